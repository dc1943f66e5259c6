import pytest

from penstock.core import errors
from penstock.core.errors import MissingExtraError, PenstockError, nearest


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("PenstockError", 1),
        ("ConfigError", 2),
        ("MissingExtraError", 2),
        ("EnvWorkerError", 3),
        ("LearnerError", 4),
        ("NonFiniteError", 4),
        ("CheckpointError", 5),
    ],
)
def test_every_error_has_its_exit_code(name: str, code: int):
    cls = getattr(errors, name)
    assert issubclass(cls, PenstockError)
    assert cls.exit_code == code


def test_config_errors_are_value_errors():
    assert issubclass(errors.ConfigError, ValueError)


def test_a_missing_extra_says_how_to_install_it():
    text = str(MissingExtraError("ale_py", "atari"))
    assert text == "ale_py is not installed; it comes with an extra: pip install 'penstock[atari]'"


def test_nearest_names_the_close_words_or_all_of_few():
    assert nearest("gama", ["gamma", "lambda", "lr"]) == "did you mean 'gamma' or 'lambda'?"
    assert nearest("ratee", ["rate", "rates", "batch"]).startswith("did you mean 'rate")
    assert nearest("zzz", ["b", "a", "a"]) == "known: a, b"
    assert nearest("zzz", [str(i) for i in range(10, 40)]) == "known: " + ", ".join(map(str, range(10, 22))) + ", ..."


def test_the_words_of_an_error_do_not_raise():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert errors.words_of(ValueError("a\nb")) == "ValueError: a\nb"
    assert errors.words_of(SystemExit(3)) == "SystemExit: 3"
    assert errors.words_of(Mute()) == "Mute, whose own __str__ raises RuntimeError"
