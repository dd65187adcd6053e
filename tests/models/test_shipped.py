import functools
from importlib import resources

from attnsuite.models import generate, load_shipped, load_text
from attnsuite.models.parameters import count_parameters
from pretrain import bigram_bits, bits_per_byte


@functools.cache
def prose():
    return load_text()


@functools.cache
def model():
    return load_shipped()


@functools.cache
def bits():
    """Per byte, of the first held-out ones."""
    return bits_per_byte(model(), prose().held_out[:4097], length=512, backend="standard").mean()


def test_the_shipped_checkpoint_clearly_beats_a_bigram_on_held_out_prose():
    assert bits() < bigram_bits(prose().train, prose().held_out[:4097]) - 0.5


def test_it_learned_from_more_than_the_last_few_bytes():
    """With a window of 4 bytes the same weights do worse: there is context to lose."""
    narrow = model().with_config(attention="sliding", window_size=4)
    assert bits_per_byte(narrow, prose().held_out[:4097], length=512, backend="standard").mean() > bits() + 0.1


def test_its_size_is_what_a_package_can_carry():
    folder = resources.files("attnsuite.models") / "checkpoints" / "tiny-bytes"
    assert len((folder / "model.safetensors").read_bytes()) < 10_000_000
    assert 1_000_000 < count_parameters(model().config) < 3_000_000
    assert "Bits per byte" in (folder / "README.md").read_text(encoding="utf-8")


def test_it_writes_letters():
    prompt = [list(b"The value of the expression is")]
    written = bytes(generate(model(), prompt, 24, backend="standard")[0].tolist())
    assert written.isascii()
    assert sum(chr(c).isalpha() or c == 32 for c in written) > 16
