"""`vitlite list` and `vitlite info`."""

import json

import pytest
from commands import Run

from vitlite.weights import zoo


def test_list(run: Run) -> None:
    code, out, _ = run("list", "vit_small_8")
    assert code == 0
    assert out == (
        "name              params   image  GMACs  top-1     licence\n"
        "vit_small_8.dino  21.7 M  224 px   22.4      -  apache-2.0\n"
    )
    names = [row["name"] for row in json.loads(run("list", "--json")[1])]
    assert names == sorted(zoo.RECORDS, key=names.index)
    assert len(names) == len(zoo.RECORDS)
    assert "vit_base_16 is vit_base_16.augreg2_in21k_ft_in1k" in run("list", "vit_base_16*")[1]
    code, _, err = run("list", "vit_smoll")
    assert code == 1
    assert "No model matches 'vit_smoll'. Did you mean vit_small_" in err


@pytest.mark.parametrize("command", ["list", "info"])
def test_parts_in_another_order_are_understood(run: Run, command: str) -> None:
    for name, meant in (("deit_tiny_16", "vit_tiny_16.deit_fb_in1k"), ("dino-base-16", "vit_base_16.dino")):
        code, _, err = run(command, name)
        assert code == 1
        assert f"Did you mean {meant}" in err


def test_info(run: Run) -> None:
    code, out, _ = run("info", "deit_tiny_patch16_224.fb_in1k")
    assert code == 0
    assert out.startswith("vit_tiny_16.deit_fb_in1k\n")
    assert "224 x 224 px, resized for a centre crop of 0.9, bicubic, mean 0.485 0.456 0.406" in out
    *_, last = out.splitlines()
    assert last.split() == ["all", "5.7", "M", "1.254"]
    fields = json.loads(run("info", "vit_base_16", "--json")[1])
    assert fields["params"] == 86567656
    assert fields["config"]["depth"] == 12
    assert sum(layer["params"] for layer in fields["layers"]) == fields["params"]
    assert "registers=4" in run("info", "vit_small_14.reg4_dinov2_lvd142m_518")[1]


def test_info_of_what_is_too_large_for_most_machines(run: Run) -> None:
    code, out, _ = run("info", "vit_7b_patch16_dinov3.lvd1689m")
    assert code == 0
    assert out.startswith("vit_7b_16.dinov3_lvd1689m_256\n")
    assert "licence      dinov3-license\n" in out
    assert "positions=rope" in out
    assert "size         6.7 G parameters, " in out
    assert "note         27 GB; " in out
