"""What is read of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal_toolkit import machine

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth1\t0007630A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
"""


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 2), ("", 0), ("-1", 0), ("0", 1), ("1,0", 2), ("0,-1,1", 1), ("7", 0), ("GPU-ab,MIG-cd", 2)],
)
def test_gpus_are_the_device_nodes_that_cuda_would_show(visible: str | None, count: int) -> None:
    devices = ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"]
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert machine.count_gpus(devices, environ) == count


def test_without_device_nodes_there_are_no_gpus() -> None:
    assert machine.count_gpus(["null"], {"CUDA_VISIBLE_DEVICES": "0"}) == 0


@pytest.mark.parametrize(("text", "quota"), [("max 100000", None), ("50000 100000", 0.5), ("250000 100000", 2.5)])
def test_the_cgroups_quota(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(text)
    assert machine._quota(str(tmp_path)) == quota


def test_the_quota_of_cgroups_version_1(tmp_path: Path) -> None:
    cgroup = tmp_path / "sys/fs/cgroup/cpu"
    cgroup.mkdir(parents=True)
    (cgroup / "cpu.cfs_period_us").write_text("100000\n")
    (cgroup / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine._quota(str(tmp_path)) is None
    (cgroup / "cpu.cfs_quota_us").write_text("100000\n")
    assert machine._quota(str(tmp_path)) == 1
    assert machine.count_cpus(str(tmp_path)) == 1


@pytest.mark.parametrize(
    ("address", "interface"), [("10.99.7.2", "eth1"), ("172.17.3.4", "eth0"), ("8.8.8.8", "eth0"), ("0.0.0.0", "eth0")]
)
def test_the_interface_that_routes_to_a_peer(address: str, interface: str) -> None:
    assert machine.route_interface(ROUTES, address) == interface


def test_no_route_at_all() -> None:
    assert machine.route_interface(ROUTES.splitlines()[0], "10.0.0.1") == ""


def test_an_interface_that_is_there_is_taken() -> None:
    assert machine.choose_interface("lo", []) == ("lo", "")


def test_one_that_is_not_is_replaced_and_said() -> None:
    chosen, note = machine.choose_interface("ethwe", ["localhost"])
    assert chosen != "ethwe"
    assert "'ethwe', which is not an interface here" in note


def test_one_peer_that_is_known_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name that is not known yet may take a name server's time limit."""
    asked: list[str] = []

    def resolve(peer: str) -> str:
        asked.append(peer)
        return "" if peer == "algo-2" else "127.0.0.1"

    monkeypatch.setattr(machine, "_resolve", resolve)
    machine.choose_interface("ethwe", ["algo-2", "algo-3", "algo-4"])
    assert asked == ["algo-2", "algo-3"]
