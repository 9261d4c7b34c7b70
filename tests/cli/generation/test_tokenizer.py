"""Text is decoded while ids arrive. Text that a later id could change is held back."""

from dflash_cli.generation.tokenizer import StreamDecoder
from dflash_testing.pairs import bundled_tokenizer


def test_text_is_released_only_when_it_is_certain() -> None:
    tokenizer = bundled_tokenizer()
    text = "naïve → 中文 🙂 end"
    ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push([token]) for token in ids]
    assert "".join(pieces) + decoder.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)
    cut = StreamDecoder(tokenizer)
    assert "".join(cut.push([token]) for token in ids[:-8]) + cut.finish() == tokenizer.decode(ids[:-8])
