"""The tokens that end a text of the given target."""

from dflash_cli.probing.probe_options import ProbeOptions, _end_ids
from dflash_testing.paths import ROOT


def test_the_end_tokens_of_a_target_come_from_its_files() -> None:
    target = ROOT / "dflash_cli" / "tiny" / "target"
    assert _end_ids(ProbeOptions(target=str(target))) == (0,)
    assert _end_ids(ProbeOptions()) == ()
