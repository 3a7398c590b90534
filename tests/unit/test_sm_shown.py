"""What `hocket explain` and `hocket doctor` say of multiprocessors and of what transports state of themselves."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import test_doctor as doctor
from test_explain import DBO, V3, described, shown

from hocket.doctor import examine
from hocket.doctor.backends import backends
from hocket.doctor.children import Outcome


@pytest.mark.parametrize(
    ("comm_sms", "changes", "comm"),
    [
        ("20", {}, 20),
        ("20", {"max_nccl_ctas": 4}, 4),
        ("20", {"all2all_backend": "torch"}, 20),
        ("0", {}, 0),
        ("20", {"emulate_link_gb_per_s": 46.0}, 20),
        ("20", {"emulate_link_gb_per_s": 46.0, "all2all_backend": "nvlink_copy"}, 2),
        ("20", {"device": "cpu"}, 0),
    ],
)
def test_how_multiprocessors_are_divided(
    comm_sms: str, changes: dict[str, Any], comm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOCKET_DBO_COMM_SMS", comm_sms)
    asked = {"model": V3, **DBO, "device": "cuda", **changes}
    assert described(None, **asked)["sms"] == {"comm": comm, "green_context": False}
    text = " ".join(shown(**asked).split())
    assert (f"SMs transfers take at most {comm} of a GPU's (HOCKET_DBO_COMM_SMS), compute" in text) == (comm > 0)
    assert ("SMs not divided" in text) == (comm == 0 and "device" not in changes)


def test_nccl_limit_that_comes_of_it_is_explained() -> None:
    rows = {one["option"]: one for one in described(None, model=V3, **DBO, device="cuda")["options"]}
    assert rows["max_nccl_ctas"]["became"] == 20
    assert rows["max_nccl_ctas"]["why"] == "what split steps leave to transfers (HOCKET_DBO_COMM_SMS)"


def test_explain_says_what_the_transport_states() -> None:
    text = " ".join(shown(**DBO, all2all_backend="torch").split())
    assert "SMs as NCCL likes, send and receive together, the host waits to send, not in CUDA graphs" in text
    apart = described(**DBO, all2all_backend="allgather_reducescatter", emulate_link_gb_per_s=1)["transport_traits"]
    assert apart == {"max_sms": None, "is_apart": True, "launch_blocks": False, "captures": True}


def test_doctor_says_it_of_each_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hocket.moe.transport.torch_a2a", None)
    found = [one for one in backends(doctor.config()) if one["kind"] == "transport"]
    doctor.pretend(monkeypatch, {examine.SURVEY: Outcome([{"backends": found}])})
    text = " ".join(doctor.shown(doctor.examined(links=False)).split())
    assert "local ✓ available: no SMs, send and receive together, sent without waiting, in CUDA graphs" in text
    assert "torch ✗ ModuleNotFoundError" in text
