"""How the server listens and what it lets in. Knows nothing of engines."""

from __future__ import annotations

import math
import os
import ssl
from dataclasses import dataclass, fields
from pathlib import Path

from hocket.errors import ConfigError
from hocket.metrics.table import NAMES, check_names
from hocket.server.tools import check_parser
from hocket.tokenizer.reasoning import PARSERS as REASONING_PARSERS

ON_RANK_LOSS = ("exit", "restart")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of `hocket serve`; each is explained by its option's help. Times are in seconds.

    Raises ConfigError for what cannot work, before anything is loaded.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    on_rank_loss: str = "exit"
    prefix_affinity: bool = True
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    profile_dir: str | None = None
    metrics_names: str = NAMES[0]
    max_concurrent_requests: int = 1024
    max_body_bytes: int = 8 * 2**20
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    keep_alive_s: int = 5
    drain_timeout_s: float = 60.0
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None

    def __post_init__(self) -> None:
        if self.on_rank_loss not in ON_RANK_LOSS:
            raise ConfigError("on_rank_loss", self.on_rank_loss, " or ".join(ON_RANK_LOSS))
        for field in fields(self):
            if field.name.endswith("_s") and not (math.isfinite(value := getattr(self, field.name)) and value >= 0):
                raise ConfigError(field.name, value, "seconds, at least 0 and finite")
        check_names(self.metrics_names)
        if self.reasoning_parser is not None and self.reasoning_parser not in REASONING_PARSERS:
            raise ConfigError("reasoning_parser", self.reasoning_parser, ", ".join(REASONING_PARSERS))
        check_parser(self.tool_call_parser, auto=self.enable_auto_tool_choice)
        if self.profile_dir is not None and not _is_writable_folder(self.profile_dir):
            raise ConfigError("profile_dir", self.profile_dir, "a folder that can be written to")
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError("api_key", "…", "text of ASCII characters, not empty")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            given = "ssl_certfile" if self.ssl_certfile else "ssl_keyfile"
            raise ConfigError(given, getattr(self, given), "both --ssl-certfile and --ssl-keyfile, or neither")
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ConfigError("ssl_ca_certs", self.ssl_ca_certs, "a file beside --ssl-certfile and --ssl-keyfile")
        self._try_certificates()

    def _try_certificates(self) -> None:
        for field in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            path = getattr(self, field)
            if path and not Path(path).is_file():
                raise ConfigError(field, path, "a file in PEM format")
        if self.ssl_certfile:
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                    self.ssl_certfile, self.ssl_keyfile, lambda: ""
                )
            except (OSError, ssl.SSLError) as error:
                where = f"with ssl_keyfile {self.ssl_keyfile}"
                allowed = f"a certificate in PEM format and its key, not encrypted ({error})"
                raise ConfigError("ssl_certfile", self.ssl_certfile, allowed, where=where) from None
        if self.ssl_ca_certs:
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_verify_locations(self.ssl_ca_certs)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError("ssl_ca_certs", self.ssl_ca_certs, f"certificates in PEM format ({error})") from None


def _is_writable_folder(path: str) -> bool:
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
