"""`hocket serve`: the OpenAI-compatible server's command line. Serving itself is in `hocket.server`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from hocket.cli.options import engine_options
from hocket.config.hosts import DEFAULT_ADDRESS, DEFAULT_PORT, HostConfig
from hocket.config.options import Options
from hocket.envs import API_KEY
from hocket.errors import BackendUnavailable, ConfigError

_SERVER = "Server"
_LIMITS = "Server limits"
_HOSTS = "Many hosts"


@engine_options()
def serve(
    *,
    options: Options,
    model_name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="the same as --model", show_default=False)
    ] = None,
    host: Annotated[
        str, typer.Option(help="address to listen on; 0.0.0.0: every one of this host", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="port to listen on; 0: any free one", min=0, max=65535, rich_help_panel=_SERVER)
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="names in the API, one or more, if not the model's", rich_help_panel=_SERVER),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"key that requests must bring; may be given again. {API_KEY.name} does the same, unseen by others",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    on_rank_loss: Annotated[
        str,
        typer.Option(help="when a rank is lost: exit (code 1), or restart all ranks", rich_help_panel=_SERVER),
    ] = "exit",
    prefix_affinity: Annotated[
        bool,
        typer.Option(
            help="send a request to the rank whose cache has the beginning of its prompt, unless that rank has "
            "more tokens to compute than another one, by more than this saves",
            rich_help_panel=_SERVER,
        ),
    ] = True,
    metrics_names: Annotated[
        str, typer.Option(help="prefix of the metrics that vLLM has too: hocket or vllm", rich_help_panel=_SERVER)
    ] = "hocket",
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="tell the model's reasoning from its answer: deepseek_r1, deepseek_v3 or qwen3 (default: not)",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice",
            help="let models call tools as they like, written as --tool-call-parser says",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="how the model writes tool calls: hermes (Qwen), deepseek_v3 (V3, R1) or deepseek_v31",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    profile_dir: Annotated[
        str | None,
        typer.Option(
            help="folder for traces that POST /start_profile and /stop_profile ask for (default: neither is possible)",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origins",
            help="web pages' origin that browsers let in (CORS), * for any; may be given again (default: none)",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(help="certificate for HTTPS, PEM", rich_help_panel=_SERVER)
    ] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(help="its key, PEM, no password", rich_help_panel=_SERVER)] = None,
    ssl_ca_certs: Annotated[
        str | None,
        typer.Option(help="let in only clients with a certificate of these authorities, PEM", rich_help_panel=_SERVER),
    ] = None,
    max_concurrent_requests: Annotated[
        int, typer.Option(help="requests answered at once; more get status 429", min=1, rich_help_panel=_LIMITS)
    ] = 1024,
    max_body_bytes: Annotated[
        int, typer.Option(help="largest body of a request; else status 413", min=1, rich_help_panel=_LIMITS)
    ] = 8 * 2**20,
    header_timeout: Annotated[
        float, typer.Option(help="seconds for a request's headers", min=0.1, rich_help_panel=_LIMITS)
    ] = 10.0,
    body_timeout: Annotated[float, typer.Option(help="seconds for its body", min=0.1, rich_help_panel=_LIMITS)] = 30.0,
    send_timeout: Annotated[
        float, typer.Option(help="seconds that a client may leave an answer unread", min=0.1, rich_help_panel=_LIMITS)
    ] = 60.0,
    drain_timeout: Annotated[
        float, typer.Option(help="seconds to finish requests after SIGTERM", min=0.0, rich_help_panel=_LIMITS)
    ] = 60.0,
    data_parallel_size_local: Annotated[
        int | None, typer.Option(help="ranks on this host (default: all)", min=1, rich_help_panel=_HOSTS)
    ] = None,
    data_parallel_start_rank: Annotated[
        int | None,
        typer.Option(help="the first of them; with --headless or hybrid balancing", min=0, rich_help_panel=_HOSTS),
    ] = None,
    data_parallel_address: Annotated[
        str | None,
        typer.Option(
            help=f"name or IPv4 address of the server's host, for the other hosts alone (default: {DEFAULT_ADDRESS})",
            show_default=False,
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    data_parallel_rpc_port: Annotated[
        int | None,
        typer.Option(
            help=f"port at which the hosts meet there (default: {DEFAULT_PORT})",
            show_default=False,
            min=1,
            max=65535,
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    data_parallel_rank: Annotated[
        int | None,
        typer.Option(
            help="the one rank of this server, where every rank has a server of its own and something else balances",
            min=0,
            show_default=False,
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    data_parallel_external_lb: Annotated[
        bool,
        typer.Option(
            "--data-parallel-external-lb", help="said by --data-parallel-rank already", rich_help_panel=_HOSTS
        ),
    ] = False,
    data_parallel_hybrid_lb: Annotated[
        bool,
        typer.Option(
            "--data-parallel-hybrid-lb",
            help="every host has a server for its own ranks: with --data-parallel-size-local and -start-rank",
            rich_help_panel=_HOSTS,
        ),
    ] = False,
    headless: Annotated[
        bool,
        typer.Option("--headless", help="run ranks for a server on another host, no HTTP here", rich_help_panel=_HOSTS),
    ] = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does: completions and chat, streamed or not.

    Further paths: /v1/models, /tokenize, /detokenize, /abort, /health, /ping, /load, /metrics, /version, /openapi.json.
    On many hosts: one command on each, or torchrun; or a server for each rank or host (docs/many-nodes.md).
    SIGTERM and Ctrl-C let running requests end. Exit code 0 then; 1: a rank was lost; 2: wrong options.

    Examples:

    hocket serve tiny --data-parallel-size 2 --enable-expert-parallel

    The second of two servers with a rank each:

    hocket serve tiny --data-parallel-size 2 --enable-expert-parallel --data-parallel-rank 1 --port 8001

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "In the beginning"}'
    """
    if model_name is not None:
        if options.model not in (Options.model, model_name):
            raise ConfigError("model", options.model, f"{model_name}, the MODEL that was given, or only one of both")
        options = dataclasses.replace(options, model=model_name)
    try:
        from hocket.server.run import serve as run
        from hocket.server.settings import Settings
    except ImportError as error:
        missing = error.name or str(error)
        raise BackendUnavailable("package", missing, "the server needs it: pip install 'hocket[server]'") from None
    keys = [*(api_key or ()), *filter(None, [API_KEY.get()])]
    settings = Settings(
        host=host,
        port=port,
        served_model_names=tuple(served_model_name or ()),
        api_keys=tuple(keys),
        on_rank_loss=on_rank_loss,
        prefix_affinity=prefix_affinity,
        reasoning_parser=reasoning_parser,
        enable_auto_tool_choice=enable_auto_tool_choice,
        tool_call_parser=tool_call_parser,
        profile_dir=profile_dir,
        metrics_names=metrics_names,
        max_concurrent_requests=max_concurrent_requests,
        max_body_bytes=max_body_bytes,
        header_timeout_s=header_timeout,
        body_timeout_s=body_timeout,
        send_timeout_s=send_timeout,
        drain_timeout_s=drain_timeout,
        allowed_origins=tuple(allowed_origin or ()),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        ssl_ca_certs=ssl_ca_certs,
    )
    hosts = HostConfig.from_flags(
        options.data_parallel_size,
        size_local=data_parallel_size_local,
        start_rank=data_parallel_start_rank,
        address=data_parallel_address,
        port=data_parallel_rpc_port,
        headless=headless,
        rank=data_parallel_rank,
        external_lb=data_parallel_external_lb,
        hybrid_lb=data_parallel_hybrid_lb,
    )
    run(options, settings, hosts)
