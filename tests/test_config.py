"""What a user can get wrong in a recipe or on the command line: one clear sentence, exit code 2, before any work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from grpo_kernels import Objective
from grpo_kernels.backends import cpu
from grpo_trainer.cli import main
from grpo_trainer.config import Config, Preset, keys, load_config
from grpo_trainer.errors import UserError
from tiny import write_model

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))
GOOD = {"model": "somewhere", "task": {"name": "arithmetic"}}


def recipe(folder: Path, **settings: object) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(GOOD | settings))
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_are_valid(path: Path) -> None:
    assert load_config(path).steps > 0


def test_overrides(tmp_path: Path) -> None:
    config = load_config(recipe(tmp_path), ["sampling.temperature=0.7", "steps=3", "task.name=countdown", "optimizer.learning_rate=1e-5"])
    assert (config.sampling.temperature, config.steps, config.task.name, config.optimizer.learning_rate) == (0.7, 3, "countdown", 1e-5)


def test_overrides_mean_what_they_say(tmp_path: Path) -> None:
    """YAML would read 010 as eight, no as false and a date as a date."""
    config = load_config(recipe(tmp_path), ["seed=010", "run_dir=no", "model=2024-01-01", "objective.clip_high=none"])
    assert (config.seed, config.run_dir, config.model, config.objective.clip_high) == (10, "no", "2024-01-01", None)


def test_an_empty_section_holds_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: m\ntask: {name: arithmetic}\nsampling:\n")
    assert load_config(path).sampling.temperature == 1.0
    assert load_config(path, ["sampling.temperature=0.7"]).sampling.temperature == 0.7


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + yaml.safe_dump(GOOD).encode())
    assert load_config(path).model == "somewhere"


def test_a_recipe_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("model: caf\u00e9".encode("latin-1"))
    with pytest.raises(UserError, match="is not valid YAML"):
        load_config(path)


def test_a_resolved_config_can_be_read_back(tmp_path: Path) -> None:
    config = load_config(recipe(tmp_path), ["objective.preset=dr_grpo"])
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    assert load_config(path) == config


def test_presets(tmp_path: Path) -> None:
    def objective(*overrides: str) -> tuple[object, str]:
        config = load_config(recipe(tmp_path), list(overrides))
        return config.objective.build(config.sampling.max_new_tokens), config.objective.scale()

    built, scale = objective("objective.preset=dr_grpo", "sampling.max_new_tokens=33")
    assert (built.aggregation, built.constant_length, scale) == ("constant", 33, "none")
    built, scale = objective("objective.preset=dapo", "objective.kl_coef=0.1", "objective.kl=k1")
    assert (built.aggregation, built.clip_high, built.kl, built.kl_coef, scale) == ("token", 0.28, "k1", 0.1, "group")
    built, scale = objective("objective.preset=rloo", "objective.entropy_coef=0.01")
    assert (built.policy_loss, built.constant_length, built.entropy_coef, scale) == ("reinforce", 1, 0.01, "none")
    for preset in get_args(Preset):
        built, _ = objective(f"objective.preset={preset}", "sampling.max_new_tokens=33")
        assert built == getattr(Objective, preset)(**({"constant_length": 33} if preset == "dr_grpo" else {}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["group_sise=8"], "unknown key 'group_sise'; did you mean 'group_size'?"),
        (["sampling.temprature=1"], "unknown key 'sampling.temprature'; did you mean 'sampling.temperature'?"),
        (["task.largst=3"], "unknown key 'task.largst'; did you mean 'task.largest'?"),
        (["zzzzzzzz=1"], "unknown key 'zzzzzzzz'; grpo train --help lists the keys"),
        (["group_size=1"], "group_size is 1; it must be at least 2"),
        (["group_size=0"], "group_size is 0; it must be at least 2"),
        (["sampling.temperature=0"], "sampling.temperature is 0; it must be greater than or equal to 0.001"),
        (["sampling.temperature=hot"], "sampling.temperature is 'hot'; it must be a valid number"),
        (["sampling.temperature=nan"], "sampling.temperature is nan"),
        (["sampling.temperature=1e-320"], "sampling.temperature is 1e-320; it must be greater than or equal to 0.001"),
        (["sampling.temperature=inf"], "sampling.temperature is inf"),
        (["steps=1:30"], "steps is '1:30'; it must be a valid integer"),
        (["steps=1e2"], "steps is 1e2; it must be a valid integer"),
        (["steps=0"], "steps is 0; it must be greater than or equal to 1"),
        (["steps=2.5"], "steps is 2.5; it must be a valid integer"),
        (["objective.preset=ppo"], "objective.preset is 'ppo'; it must be 'grpo', 'dr_grpo', 'dapo', 'gspo'"),
        (["objective.preset=cispo", "objective.max_ratio=9"], "objective.max_ratio is 9.0, but policy_loss is 'cispo'; only 'clip' has it"),
        (["objective.max_ratio=1.1"], "objective.max_ratio is 1.1; it must be finite and at least 1.2"),
        (["objective.clip_low=1.5"], "objective.clip_low is 1.5; it must be less than or equal to 1"),
        (["task.name=chess"], "task.name is 'chess'; it must be one of 'arithmetic', 'countdown'"),
        (["task=chess"], "task"),
        (["task.held_out=100"], "task.held_out is 100; there are only 100 sums"),
        (["backend=gpu"], "backend is 'gpu'"),
        (["sampling.rows=4"], "sampling.rows is 4; it must be at least group_size = 8"),
        (["steps"], "override 'steps' is not of the form key=value"),
        (["steps.more=1", "steps.more.less=2"], "override 'steps.more.less=2': more holds the value '1'"),
        (["model="], "model is None"),
        (["seed=-1"], "seed is -1"),
        (["save_every=-1", "steps=0"], "steps is 0; .*; save_every is -1"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str) -> None:
    assert main(["train", str(recipe(tmp_path)), *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message if ".*" in message else re.escape(message), error), error


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "not valid YAML"), ("- a\n- b", "holds a list"), ("task: {name: arithmetic}", "model is missing"), ("", "model is missing")],
)
def test_malformed_recipes(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(path)


def test_a_missing_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("model", ["./no/such/folder", "/no/such/folder", "nosuchmodel", "a/b/c"])
def test_a_missing_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert main(["train", str(recipe(tmp_path, model=model, run_dir=str(tmp_path / "run")))]) == 2
    assert f"model is {model!r}; there is no such folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_hub_model_that_cannot_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe(tmp_path, model="nobody/nothing", run_dir=str(tmp_path / "run")))]) == 2
    assert "model is 'nobody/nothing'; no such folder here, and the model hub gives no model" in capsys.readouterr().err


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe(tmp_path, model=str(tmp_path)))]) == 2
    assert "holds no config.json" in capsys.readouterr().err


def test_a_prompt_longer_than_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model")
    arguments = ["train", str(recipe(tmp_path, model=str(model), run_dir=str(tmp_path / "run"))), "sampling.max_new_tokens=120"]
    assert main(arguments) == 2
    assert "do not fit the context of 160 tokens" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_data_file_with_a_missing_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"numbers": [1, 2], "target": 3}\n')
    model = write_model(tmp_path / "model")
    assert main(["train", str(recipe(tmp_path, model=str(model))), "task.name=countdown", f"task.data={data}"]) == 2
    assert "column 'nums' is missing" in capsys.readouterr().err


def test_a_run_folder_that_is_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    assert main(["train", str(recipe(tmp_path)), f"run_dir={tmp_path / 'run'}"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "run")]) == 2
    assert "is not a run folder" in capsys.readouterr().err


@pytest.mark.parametrize("run_dir", ["{tmp}/file/run", "/proc/run"])
def test_a_run_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str], run_dir: str) -> None:
    (tmp_path / "file").touch()
    assert main(["train", str(recipe(tmp_path)), f"run_dir={run_dir.format(tmp=tmp_path)}"]) == 2
    assert "it cannot be used" in capsys.readouterr().err


def test_a_refused_run_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["train", str(recipe(tmp_path, model="./none"))]) == 2
    assert not list((tmp_path / "here" / "runs").iterdir())


@pytest.mark.parametrize("cache", ["{tmp}/file", "/proc/cache"])
def test_a_cache_folder_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    pytest.importorskip("accelerate", reason="the conversion's own requirements are checked first")
    monkeypatch.setattr("grpo_trainer.smollm2._wheel_version", lambda: "0")
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRPO_CACHE", cache.format(tmp=tmp_path))
    assert main(["train", str(recipe(tmp_path, model="smollm2-135m", run_dir=str(tmp_path / "run")))]) == 2
    assert "set GRPO_CACHE to a folder that can be written" in capsys.readouterr().err


def test_help_into_a_closed_pipe() -> None:
    command = f"{sys.executable} -m grpo_trainer.cli train --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage")
    assert done.stderr == ""


def test_help_lists_every_key_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for name in ("sampling.temperature (1.0)", "task.held_out (30 or 100)", "model (required)", "optimizer.learning_rate (1e-06)"):
        assert name in text
    assert set(Config.model_fields) - {"task", "sampling", "objective", "optimizer", "evaluation"} <= {
        line.split(" (")[0].strip() for line in text.splitlines()
    }


def test_a_backend_that_is_not_there_is_refused_before_the_model_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "import_error", "not built")
    monkeypatch.setattr("grpo_trainer.policy.Policy.load", lambda *a, **k: pytest.fail("the model was loaded"))
    model = write_model(tmp_path / "model")
    arguments = ["train", str(recipe(tmp_path, model=str(model), run_dir=str(tmp_path / "run"), backend="cpu"))]
    assert main([*arguments, "sampling.max_new_tokens=8"]) == 2
    assert "backend 'cpu' is not available" in capsys.readouterr().err


def test_a_model_that_can_never_stop_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model")
    (model / "generation_config.json").unlink()
    for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        content = json.loads((model / name).read_text())
        del content[key]
        (model / name).write_text(json.dumps(content))
    assert main(["train", str(recipe(tmp_path, model=str(model), run_dir=str(tmp_path / "run"))), "sampling.max_new_tokens=8"]) == 2
    assert "names no end-of-sequence token" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_every_key_has_a_meaning() -> None:
    assert [key for key, (_, meaning) in keys().items() if not meaning] == []


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "Backends of the loss" in text
    assert "torch   yes" in text
