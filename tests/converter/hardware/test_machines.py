"""Clusters, devices and files of devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from shardconv_runtime.errors import OptionError

from shardconv.hardware.machines import (
    Cluster,
    Spread,
    devices_text,
    known_devices,
    parse_cluster,
    read_devices,
)


@pytest.mark.parametrize(
    ("text", "hosts", "devices", "name"),
    [
        ("2x8xH100", 2, 8, "H100"),
        ("8xh200", 1, 8, "H200"),
        ("L4", 1, 1, "L4"),
        ("4xA100-40gb", 1, 4, "A100-40GB"),
    ],
)
def test_a_cluster_is_hosts_times_devices_times_a_device(
    text: str, hosts: int, devices: int, name: str
) -> None:
    cluster = parse_cluster(text)
    assert (cluster.hosts, cluster.devices, cluster.device.name) == (hosts, devices, name)
    assert cluster.num_devices == hosts * devices
    assert parse_cluster(cluster.name) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2x8", "'2x8' is no cluster; give hosts x devices x device, for example 2x8xH100"),
        ("0xH100", "has 0 devices; give 1 to 65,536"),
        ("9999x9999xH100", "has 99,980,001 devices"),
        ("8xH1000", "there is no device 'H1000'; give one of A100-40GB"),
    ],
)
def test_a_text_that_is_no_cluster_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        parse_cluster(text)


def test_ranks_are_counted_through_the_devices_of_a_host() -> None:
    cluster = Cluster(2, 4, parse_cluster("L4").device)
    assert [cluster.host_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert cluster.spread((0, 1, 4)) == Spread(3, 2, 1, 2)
    assert cluster.spread((4, 5)) == Spread(2, 1, 2, 2)


def test_a_file_of_devices_has_them_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    path.write_text(devices_text(known_devices()))
    assert read_devices(path) == known_devices()
    own = tmp_path / "own.json"
    own.write_text(path.read_text().replace('"L4"', '"Mine"'))
    assert parse_cluster("2xMine", own).device.bandwidth == parse_cluster("L4").device.bandwidth


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            '"bandwidth": 4800000000000.0',
            '"bandwidth": 0',
            "devices[3]: the memory and all rates",
        ),
        ('"kernel_s"', '"kernels_s"', 'unknown key "kernels_s"'),
        ('"version": 1', '"version": 2', "this reads version 1, the file has 2"),
    ],
)
def test_a_malformed_file_of_devices_is_refused(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "devices.json"
    path.write_text(devices_text(known_devices()).replace(before, after))
    with pytest.raises(OptionError, match=re.escape(message)):
        read_devices(path)


def test_each_device_of_the_table_names_its_source() -> None:
    names = [device.name for device in known_devices()]
    assert len({name.casefold() for name in names}) == len(names)
    for device in known_devices():
        assert device.is_measured or device.sources[0].startswith("https://"), device.name
        assert not device.is_measured or "env --measure" in device.sources[0], device.name
        assert device.flops["bfloat16"] > device.flops["float32"]
        assert device.inside.bandwidth >= device.between.bandwidth
