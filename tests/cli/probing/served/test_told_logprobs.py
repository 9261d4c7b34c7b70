"""Log-probabilities of an answer, paired with its tokens."""

from dflash_cli.probing.served.told_logprobs import ToldLogprobs


def test_log_probabilities_are_paired_with_the_tokens_they_name() -> None:
    sound = ToldLogprobs.of([5, 6, 5], [-1.0, -2.0, -3.0], [5, 6, 5])
    assert (sound.by_place, sound.num_missing, sound.num_of_others) == ({0: -1.0, 1: -2.0, 2: -3.0}, 0, 0)
    unnamed = ToldLogprobs.of([5, 6], [-1.0, -2.0])
    assert unnamed.by_place == {0: -1.0, 1: -2.0}
    fewer = ToldLogprobs.of([7, 5, 6, 5, 8], [-1.0, -2.0, -3.0], [7, 5, 8])
    assert (fewer.by_place, fewer.num_missing) == ({0: -1.0, 4: -3.0}, 2), "5 stands at two places"
    shifted = ToldLogprobs.of([5, 6, 7], [-1.0, -2.0, -3.0], [6, 7, 8])
    assert (shifted.by_place, shifted.num_of_others) == ({}, 3)
    assert ToldLogprobs.of([5, 6], [None, -2.0]).num_missing == 1
    assert ToldLogprobs.of([5, 6, 7], [-1.0]).by_place == {}, "an entry without a name may be of any token"
