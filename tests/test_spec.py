"""Pipeline specs: what is accepted, what is refused and with which words, and that files round-trip."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_model.errors import InputError
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec, dump_pipeline, load_pipeline

TWO = [{"name": "small", "model": "a"}, {"name": "big", "model": "b"}]


def refusal(data: object) -> str:
    with pytest.raises(InputError) as caught:
        PipelineSpec.from_dict(data)
    return str(caught.value)


def test_defaults_are_filled_in_for_every_link():
    """A pipeline without ``links`` gets one default link per neighbouring pair."""
    spec = PipelineSpec.from_dict({"stages": [*TWO, {"name": "huge", "model": "c"}]})
    assert spec.links == (LinkSpec(lookahead=0, buffer_tokens=16, max_window=16),) * 2
    assert (spec.strategy, spec.handshake, spec.label) == ("pipelined", "overlapped", "{small,big,huge}")
    assert spec.target.name == "huge"


@pytest.mark.parametrize(("data", "words"), [
    ({"stages": TWO, "lookahed": 2}, "lookahed is not a known key"),
    ({"stages": [{**TWO[0], "latency_s": 1.0}, TWO[1]]}, "stages.0.latency_s is not a known key"),
    ({"stages": TWO, "links": [{"lookahead": -1}]}, "links.0.lookahead must be >= 0 or auto, got -1"),
    ({"stages": TWO, "links": [{"buffer_tokens": 0}]}, "links.0.buffer_tokens must be >= 1, got 0"),
    ({"stages": TWO, "links": [{"max_window": 0}]}, "links.0.max_window must be >= 1, got 0"),
    ({"stages": TWO[:1], "strategy": "pipelined"}, "stages must be >= 2 for strategy pipelined, got 1"),
    ({"stages": TWO[:1], "strategy": "speculative"}, "stages must be >= 2 for strategy speculative, got 1"),
    ({"stages": TWO, "strategy": "autoregressive"}, "stages must be 1 for strategy autoregressive, got 2"),
    ({"stages": TWO, "links": [{"lookahead": 5, "buffer_tokens": 4}]}, "min(buffer_tokens, max_window) = 4, got 5"),
    ({"stages": TWO, "links": [{"lookahead": 5, "max_window": 3}]}, "min(buffer_tokens, max_window) = 3, got 5"),
    ({"stages": TWO, "links": [{}, {}]}, "links must have one entry per neighbouring pair (1), got 2"),
    ({"stages": [TWO[0], TWO[0]]}, "stage names must differ"),
    ({"stages": TWO, "strategy": "speculative", "links": [{"lookahead": 0}]}, "lookahead must be >= 1"),
    ({"stages": [TWO[0], {**TWO[1], "drafter": "prompt-lookup"}]}, "only a first drafter may be a lookup"),
    ({"stages": [{"model": "a"}, TWO[1]]}, "stages.0.name is required"),
    ({"stages": [{**TWO[0], "threads": 0}, TWO[1]]}, "stages.0.threads must be >= 1, got 0"),
    ({"stages": TWO, "strategy": "async"}, "strategy must be 'autoregressive', 'speculative' or 'pipelined'"),
    ({}, "stages is required"),
    ([1], "pipeline"),
])
def test_a_bad_spec_is_refused_in_one_line(data: object, words: str):
    """Every refusal is one line that names the field, the rule and the value."""
    text = refusal(data)
    assert words in text
    assert "\n" not in text


def test_a_single_lookup_stage_cannot_be_a_target():
    """The target must be a model: a lookup alone can verify nothing."""
    with pytest.raises(InputError, match="lookup"):
        PipelineSpec.from_dict({"strategy": "autoregressive",
                                "stages": [{"name": "l", "model": "m", "drafter": "prompt-lookup"}]})


def test_keys_tell_what_decides_tokens_and_times():
    """Threads and device change a stage's time key and not its choice key; dtype changes both."""
    one = StageSpec(name="x", model="m")
    threads = StageSpec(name="x", model="m", threads=2)
    half = StageSpec(name="x", model="m", dtype="bfloat16")
    assert one.choice_key == threads.choice_key
    assert one.time_key != threads.time_key
    assert one.choice_key != half.choice_key
    assert StageSpec(name="l", model="m", drafter="prompt-lookup").choice_key == "prompt-lookup-3"


links = st.builds(
    lambda lookahead, extra, window: LinkSpec(
        lookahead=lookahead, buffer_tokens=lookahead + extra, max_window=lookahead + window),
    st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))


@given(st.lists(links, min_size=1, max_size=4), st.sampled_from(["speculative", "pipelined"]),
       st.sampled_from(["overlapped", "blocking"]), st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_spec_survives_to_dict_and_back(found: list[LinkSpec], strategy: str, handshake: str, lookup: bool):
    """from_dict(to_dict(x)) == x for every spec, through JSON and YAML."""
    stages = [StageSpec(name=f"s{i}", model=f"m{i}", threads=i + 1, cores=(i,), quantize="int8")
              for i in range(len(found) + 1)]
    if lookup:
        stages[0] = StageSpec(name="s0", model="m0", drafter="prompt-lookup", max_ngram=2)
    spec = PipelineSpec(stages=tuple(stages), links=tuple(found), strategy=strategy, handshake=handshake)
    assert PipelineSpec.from_dict(spec.to_dict()) == spec
    assert PipelineSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert PipelineSpec.from_dict(yaml.safe_load(yaml.safe_dump(spec.to_dict()))) == spec


def test_a_dumped_file_loads_to_the_same_spec(tmp_path):
    """The resolved configuration that is written down is the configuration."""
    spec = PipelineSpec.from_dict({"stages": TWO, "links": [{"lookahead": 3}]})
    dump_pipeline(spec, tmp_path / "p.yaml")
    assert load_pipeline(tmp_path / "p.yaml") == spec


@pytest.mark.parametrize(("name", "text", "words"), [
    ("p.yaml", "stages:\n  - name: a\n   model: b\n", "p.yaml:3 must be YAML"),
    ("p.json", '[{"path": "a"},\n {"path": }]', "p.json:2 must be JSON"),
    ("p.yaml", "- 1\n", "must be an object with the key 'path', got 'int'"),
    ("p.yaml", "just words\n", "must hold a mapping with the key 'stages'"),
    ("p.yaml", "", "must hold a mapping with the key 'stages'"),
    ("models.json", '[{"path": "a", "gpu": 1}]', "0.gpu is not a known key"),
    ("models.json", '[{"path": "a", "devices": ["cuda:0", "cuda:1"]}]', "0.devices must name one device"),
    ("models.json", "[]", "stages"),
])
def test_a_bad_file_is_refused_with_its_name(tmp_path, name: str, text: str, words: str):
    """A file that cannot be read as a pipeline names itself, the line where it can, and the rule."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_pipeline(tmp_path / name)
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_a_missing_file_a_folder_and_bytes_are_refused(tmp_path):
    """What is no text file is bad input, never a traceback of another kind."""
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00stages")
    for path, words in ((tmp_path / "no.yaml", "existing file"), (tmp_path, "readable"),
                        (tmp_path / "bytes.yaml", "readable")):
        with pytest.raises(InputError, match=words):
            load_pipeline(path)


def test_control_characters_in_yaml_are_bad_input(tmp_path):
    """YAML refuses control characters with its own error class; the user sees one line all the same."""
    (tmp_path / "p.yaml").write_text("stages: \x07", encoding="utf-8")
    with pytest.raises(InputError, match="must be YAML"):
        load_pipeline(tmp_path / "p.yaml")


def test_the_published_models_list_is_accepted_as_it_is(tmp_path):
    """A models.json list names drafter first, target last; empty entries take the defaults."""
    entries = [{"path": "hub/Small-1B", "devices": ["cuda:0"], "dtype": "float16", "quantize": None},
               {"path": "hub/Big-70B", "devices": ["cuda:1"], "dtype": None, "quantize": "4bit"}]
    (tmp_path / "models.json").write_text(json.dumps(entries), encoding="utf-8")
    spec = load_pipeline(tmp_path / "models.json")
    assert [s.name for s in spec.stages] == ["Small-1B", "Big-70B"]
    assert [s.model for s in spec.stages] == ["hub/Small-1B", "hub/Big-70B"]
    assert [(s.device, s.dtype, s.quantize) for s in spec.stages] == [
        ("cuda:0", "float16", None), ("cuda:1", "float32", "4bit")]
    assert spec.strategy == "pipelined"
    (tmp_path / "models.json").write_text(json.dumps(entries[:1]), encoding="utf-8")
    assert load_pipeline(tmp_path / "models.json").strategy == "autoregressive"
