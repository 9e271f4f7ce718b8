"""`run.toml`: what it means, and what its errors say."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from plan_support import write_prompts, write_spec
from quantroute.domain import Quantization, Sampling
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.generation import Allocation, load_run_spec, policy_class
from quantroute.money import PUSD_PER_USD
from quantroute.policy import ExclusionPolicy
from quantroute.routing import RoutingMode

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/run.toml"
ONE = '[[dataset]]\nname = "a"\nprompts = "builtin"\nmax_output_tokens = 100\n'


def error_of(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_run_spec(path)
    return str(caught.value)


def test_the_example_is_what_it_says() -> None:
    spec = load_run_spec(EXAMPLE)
    assert (spec.name, spec.model, spec.cap_pusd) == (
        "k25",
        "moonshotai/kimi-k2.5",
        5 * PUSD_PER_USD,
    )
    assert (spec.out, spec.max_in_flight) == (EXAMPLE.parent / "runs/k25", 200)
    assert spec.policy.exclude == ("Fireworks", "BaseTen")
    chat, instant = spec.datasets
    assert (chat.prompts, chat.rollouts, chat.target_output_tokens) == (None, 2, 60_000)
    assert chat.sampling == Sampling(temperature=1.0)
    assert instant.sampling == Sampling(temperature=0.7, reasoning=False)
    assert (instant.cap_pusd, instant.expected_output_tokens) == (PUSD_PER_USD, 300)
    assert spec.config().of("instant").max_output_tokens == 2_048


def test_everything_that_can_be_said_arrives(tmp_path: Path) -> None:
    write_prompts(tmp_path / "own.jsonl", ["why?"])
    path = write_spec(
        tmp_path,
        """
[policy]
native = "int4"
accept = ["fp8"]
accept_unknown = ["Novita"]
only = ["Moonshot AI"]
allow_degraded = false
min_uptime_percent = 95
max_input_usd_per_million = "0.60"
max_output_usd_per_million = "$3"
min_context_tokens = 1000
min_output_tokens = 100
required_parameters = ["seed"]
data_collection = "deny"
zdr = true
enforce_distillable_text = true
requires_bounded_price = true
[sampling]
top_p = 0.9
stop = ["END"]
[[dataset]]
name = "own"
prompts = "own.jsonl"
max_output_tokens = 512
target_rows = 1
weight = "0.5"
priority = 3
expected_reasoning_share = 0.5
[dataset.sampling]
top_p = 0.5
""",
        run='allocation = "weighted"',
    )
    spec = load_run_spec(path)
    assert spec.allocation is Allocation.WEIGHTED
    assert spec.policy == ExclusionPolicy(
        native=Quantization.INT4,
        accept=["fp8"],
        accept_unknown=["Novita"],
        only=["Moonshot AI"],
        allow_degraded=False,
        min_uptime_percent=95,
        max_input_usd_per_million="0.60",
        max_output_usd_per_million="3",
        min_context_tokens=1000,
        min_output_tokens=100,
        required_parameters=frozenset({"seed"}),
        data_collection="deny",
        zdr=True,
        enforce_distillable_text=True,
    )
    (own,) = spec.datasets
    assert own.sampling == Sampling(top_p=0.5, stop=("END",))
    assert (own.weight, own.priority, own.target_rows) == (Fraction(1, 2), 3, 1)
    assert [prompt.dataset for prompt in own.read()] == ["own"]
    assert [source.name for source in spec.config().sources] == ["own"]


@pytest.mark.parametrize(
    ("datasets", "run", "expected"),
    [
        (ONE, "cap_uds = 1", "run.toml:6: run.cap_uds: unknown field 'cap_uds'; allowed are: "),
        (ONE, 'allocation = "fair"', "run.toml:6: run.allocation: must be 'equal', 'weighted'"),
        (ONE, "name = ", "run.toml:6: not TOML: "),
        (ONE + "cap_usd = 3", "", 'dataset[1].cap_usd: money is written as text: cap_usd = "3"'),
        (ONE + 'cap_usd = "nan"', "", "run.toml:11: dataset[1].cap_usd: a cap must be finite"),
        (ONE + "rollouts = 0", "", "run.toml:11: dataset[1].rollouts: input should be greater"),
        (ONE + "rollouts = true", "", "dataset[1].rollouts: input should be a valid integer"),
        (ONE + "weight = 0", "", "dataset[1].weight: "),
        (ONE + 'weight = "heavy"', "", "run.toml:11: dataset[1].weight: a weight is a positive"),
        (ONE + "sampling = { heat = 2 }", "", "dataset[1].sampling.heat: unknown field 'heat'"),
        (ONE + "sampling = { top_p = nan }", "", "run.toml:11: dataset[1].sampling.top_p: "),
        (ONE + "sampling = { top_p = 2 }", "", "run.toml:7: dataset[1]: top_p must be in"),
        (ONE + ONE, "", "run.toml:1: run: two datasets are called a"),
        (ONE + "target_rows = 1\ntarget_output_tokens = 1", "", "not both"),
        (ONE + "expected_output_tokens = 101", "", "exceeds max_output_tokens"),
        (ONE.replace("max_output_tokens", "max_tokens"), "", "max_output_tokens: is required"),
        ("", "", "dataset: is required"),
        ('[policy]\naccept = ["fp7"]\n' + ONE, "", "run.toml:7: policy: accept: 'fp7' is not a"),
        ("[policy]\nzdr = 1\n" + ONE, "", "run.toml:8: policy.zdr: input should be a valid bool"),
        ("[polizei]\n" + ONE, "", "run.toml:7: polizei: unknown field 'polizei'; allowed are: "),
        ('[policy]\nevidence = "none.toml"\n' + ONE, "", "policy: evidence table"),
    ],
)
def test_errors_name_file_line_and_field(
    tmp_path: Path, datasets: str, run: str, expected: str
) -> None:
    assert expected in error_of(write_spec(tmp_path, datasets, run=run))


def test_lines_are_those_of_the_right_dataset(tmp_path: Path) -> None:
    second = ONE.replace('"a"', '"b"') + "rollouts = 0\n"
    assert "run.toml:16: dataset[2].rollouts" in error_of(write_spec(tmp_path, ONE + "\n" + second))


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = error_of(write_spec(tmp_path, ONE + "rollouts = 0\nweight = -1", run="x = 1"))
    assert len(text.splitlines()) == 3


def test_a_file_that_is_not_there_or_not_text_is_a_configuration_error(tmp_path: Path) -> None:
    assert "there is no such file; `quantroute init" in error_of(tmp_path / "none.toml")
    assert "cannot be read: Is a directory" in error_of(tmp_path)
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    assert "not UTF-8 at byte 0" in error_of(tmp_path / "run.toml")


def test_an_impossible_name_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = write_spec(tmp_path, ONE)
    path.write_text(path.read_text().replace('"job"', '"a/b"'))
    assert "run.toml:1: run: a run's name is made of" in error_of(path)


def test_a_missing_prompt_file_is_named_when_it_is_read(tmp_path: Path) -> None:
    spec = load_run_spec(write_spec(tmp_path, ONE.replace("builtin", "none.jsonl")))
    with pytest.raises(DatasetError, match=r"none\.jsonl"):
        spec.config()


def test_rows_of_other_policies_and_rehearsals_never_meet() -> None:
    assert policy_class(ExclusionPolicy()) == "native"
    chosen = ExclusionPolicy(native="int4", accept=["fp8"], accept_unknown=["b", "a"])
    assert policy_class(chosen) == "int4+fp8+unknown:a+unknown:b"
    assert policy_class(ExclusionPolicy(accept_unknown=True)) == "native+unknown"
    rehearsal = load_run_spec(EXAMPLE).rehearsal()
    assert rehearsal.config().policy_class == "simulated:native"
    assert (rehearsal.name, rehearsal.out.name) == ("k25-simulated", "k25-simulated")


LOCAL = """
[[local]]
name = "box"
base_url = "http://127.0.0.1:8000/v1"
quantization = "int4"
model = "kimi"
usd_per_gpu_hour = "2.50"
gpus = 8
output_tokens_per_s = 3000

[[dataset]]
name = "d"
prompts = "builtin"
max_output_tokens = 100
"""


def test_routing_and_local_servers_stand_in_the_file(tmp_path: Path) -> None:
    spec = load_run_spec(write_spec(tmp_path, LOCAL, run='routing = "delegated"'))
    assert spec.routing is RoutingMode.DELEGATED
    (local,) = spec.local
    assert (local.serves, local.model, local.endpoint.tag) == (spec.model, "kimi", "local/box")


def test_an_impossible_local_server_is_told_with_its_line(tmp_path: Path) -> None:
    path = write_spec(tmp_path, LOCAL.replace('"int4"', '"int3"'))
    with pytest.raises(ConfigurationError, match=r"run.toml:\d+: local\[1\].*int3"):
        load_run_spec(path)
