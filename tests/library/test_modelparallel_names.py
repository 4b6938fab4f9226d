"""Names that published scripts import and call, in one process: arguments, optimizers, what is not implemented."""

from __future__ import annotations

import copy
import importlib
import io
import os
import pickle
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.backend.config import check
from smdistributed.modelparallel.backend.exceptions import (
    SMPConfigError,
    SMPRuntimeError,
    SMPUnsupportedError,
    StepUsageError,
)
from smdistributed.modelparallel.torch.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad
from smdistributed.modelparallel.torch.script.half_precision import LossScale
from smdistributed.modelparallel.torch.utils import get_distribution_axis, rmsg

own_pickle = types.ModuleType("own_pickle")
own_pickle.__dict__.update(vars(pickle))


@pytest.fixture
def job(model_parallel_rank: None) -> Iterator[Any]:
    """Another job of one rank in this process, with more configuration."""

    def configure(**values: Any) -> None:
        smp.state.cfg = check({"partitions": 1, **values})
        smp.state.model = smp.state.optimizer = None

    configure()
    yield configure
    configure()


def wrapped(**options: Any) -> tuple[smp.DistributedModel, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1), **options)
    return smp.DistributedModel(module), optimizer


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("torch.utils", ("rmsg", "get_distribution_axis")),
        ("torch.optimizers", ("FusedLAMB", "FusedLamb", "FusedNovoGrad")),
        (
            "torch.nn.huggingface.gpt2",
            (
                "translate_hf_state_dict_to_smdistributed",
                "translate_hf_state_dict_to_smdistributed_gpt2",
                "translate_state_dict_to_hf_gpt2",
                "get_hf_gpt2_transformer_layer_hooks",
                "translate_hf_block_state_dict_to_smdistributed",
                "translate_layer_state_dict_to_hf_gpt2_block",
            ),
        ),
        ("torch.nn.huggingface.gptj", ("translate_hf_gptj_state_dict_to_smdistributed",)),
        ("torch.nn.huggingface.roberta", ("translate_state_dict_to_smdistributed",)),
        ("test.torch.utils", ("dump_model", "verify")),
        ("torch.nn", ("FlashAttentionLayer", "DistributedTransformerLMHead", "FusedLayerNorm")),
    ],
)
def test_what_published_scripts_import_is_there(module: str, names: tuple[str, ...]) -> None:
    found = importlib.import_module(f"smdistributed.modelparallel.{module}")
    assert all(hasattr(found, name) for name in names)


def test_small_functions_of_published_scripts(job: Any) -> None:
    assert rmsg("hello") == "[rank 0] hello"
    assert get_distribution_axis(torch.zeros(1)) is None
    verify: Any = importlib.import_module("smdistributed.modelparallel.test.torch.utils").verify
    with pytest.raises(SMPUnsupportedError, match="Fix: set SMP_VERIFY_STEPS"):
        verify("anything")


def test_translations_of_state_dicts_are_inverse_and_leave_other_names() -> None:
    huggingface: Any = smp.nn.huggingface
    plain = {"transformer.h.1.attn.c_attn.weight": torch.randn(2, 6), "transformer.h.1.attn.bias": torch.ones(1)}
    ours = huggingface.gpt2.translate_hf_state_dict_to_smdistributed({**plain, "own.weight": torch.ones(1)}, 8)
    names = {f"transformer.seq_layers.1.attention.{name}.weight" for name in ("query", "key", "value")}
    assert set(ours) == {"own.weight", *names}
    torch.testing.assert_close(
        ours["transformer.seq_layers.1.attention.key.weight"], plain["transformer.h.1.attn.c_attn.weight"].t()[2:4]
    )
    back = huggingface.gpt2.translate_state_dict_to_hf_gpt2(ours, max_seq_len=8)
    assert set(back) == {"own.weight", "transformer.h.1.attn.c_attn.weight"}
    assert torch.equal(back["transformer.h.1.attn.c_attn.weight"], plain["transformer.h.1.attn.c_attn.weight"])


def test_a_full_checkpoint_of_a_model_in_a_module_of_the_script_has_hugging_faces_names(
    job: Any, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    with smp.model_creation(tensor_parallelism=True):
        module = nn.ModuleDict({"lm": transformers.GPT2LMHeadModel(config), "layernorm": nn.LayerNorm(8)})
    names, weights = set(module.state_dict()), {key: value.clone() for key, value in module.state_dict().items()}
    model = smp.DistributedModel(module)
    assert "lm.word_embedding.weight" in model.state_dict()
    smp.save_checkpoint(tmp_path, "tag", False, model)
    assert set(torch.load(tmp_path / "tag", weights_only=True)) == names
    nn.init.zeros_(model.module.lm.word_embedding.weight)  # type: ignore[union-attr, arg-type]
    smp.resume_from_checkpoint(tmp_path, "tag", False)
    assert torch.equal(model.state_dict()["lm.word_embedding.weight"], weights["lm.transformer.wte.weight"])


def test_scripts_of_before_october_2022_find_the_model_in_an_inner_wrapper(job: Any, tmp_path: Path) -> None:
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2)))
    assert model.module.module is model.module
    assert len(list(model.modules())) == 3 and set(model.state_dict()) == {"0.weight", "0.bias"}
    torch.save(model.module, tmp_path / "whole")
    again = copy.deepcopy(torch.load(tmp_path / "whole", weights_only=False))
    assert again.module is again and again(torch.ones(1, 2)).shape == (1, 2)


def test_scripts_with_a_wrapper_of_their_own_find_the_model_one_wrapper_further_in(job: Any) -> None:
    wrapper = nn.ModuleDict({"module": nn.Linear(2, 2)})
    wrapper.__dict__["module"] = wrapper["module"]  # as FP16_Module of the scripts has it
    model = smp.DistributedModel(wrapper)
    assert model.module.module.module is wrapper["module"] and set(model.state_dict()) == {  # type: ignore[union-attr]
        "module.weight",
        "module.bias",
    }


def test_an_optimizer_of_the_script_gets_the_old_name_of_an_argument(job: Any) -> None:
    given = []

    class Old(torch.optim.SGD):
        def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803
            given.append(set_grads_to_None)

    optimizer = smp.DistributedOptimizer(Old(nn.Linear(1, 1).parameters(), 0.1))
    optimizer.zero_grad(set_grads_to_None=True)
    optimizer.zero_grad(set_to_none=True)
    optimizer.zero_grad()
    assert given == [True, True, False]
    Old.update_master_grads = lambda self: None  # type: ignore[attr-defined]
    with pytest.raises(SMPUnsupportedError, match=r"Old has single-precision copies .*Fix: wrap its inner optimizer"):
        smp.DistributedOptimizer(Old(nn.Linear(1, 1).parameters(), 0.1))


def _make_gpt2_with_layers_to_replace(**options: Any) -> Any:
    """Returns GPT-2 with marked layers, registered after its construction, as the scripts `gpt2-custom` do it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        attn_implementation="eager", **options,  # transformers 4 ignores a scale by layer otherwise
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.5)
    smp.set_tensor_parallelism(module.transformer.h, True)
    block = type(module.transformer.h[0])
    hooks = smp.nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks()
    smp.tp_register_with_module(block, smp.nn.DistributedTransformerLayer, *hooks)
    return module


@pytest.mark.parametrize("scaled", [False, True])
def test_layers_of_gpt2_that_are_replaced_alone_compute_what_hugging_faces_do(job: Any, scaled: bool) -> None:
    module = _make_gpt2_with_layers_to_replace(use_cache=False, scale_attn_by_inverse_layer_idx=scaled)
    ids, mask = torch.randint(20, (3, 6)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 6])
    expected = module(input_ids=ids, attention_mask=mask, labels=ids)
    theirs = {key: value.clone() for key, value in module.state_dict().items()}
    model = smp.DistributedModel(module)
    layers = module.transformer.h
    assert all(isinstance(layer, smp.nn.DistributedTransformerLayer) for layer in layers)
    found = model(input_ids=ids, attention_mask=mask, labels=ids)
    seen = mask.bool()
    torch.testing.assert_close(found.logits[seen], expected.logits[seen])
    torch.testing.assert_close(found.loss, expected.loss)
    names, ours = smp.nn.huggingface.gpt2, model.state_dict()
    assert "transformer.h.1.attention.query.weight" in ours
    back = names.translate_layer_state_dict_to_hf_gpt2_block(ours, 8)
    again = names.translate_hf_block_state_dict_to_smdistributed(theirs, 8)
    for wanted, translated in ((theirs, back), (ours, again)):
        assert set(translated) == set(wanted)
        assert all(torch.equal(value, wanted[key]) for key, value in translated.items())
    alone = names.translate_layer_state_dict_to_hf_gpt2_block(layers[1].state_dict())
    assert torch.equal(alone["mlp.c_fc.weight"], theirs["transformer.h.1.mlp.c_fc.weight"])


def test_a_class_of_the_script_replaces_layers_of_gpt2(job: Any) -> None:
    class Mine(smp.nn.DistributedTransformerLayer):
        pass

    hooks = smp.nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks()
    block = importlib.import_module("transformers.models.gpt2.modeling_gpt2").GPT2Block
    smp.tp_register_with_module(block, Mine, *hooks)  # it notes the arguments of layers made from now on
    module = _make_gpt2_with_layers_to_replace()
    smp.tp_register_with_module(block, Mine, *hooks)
    smp.DistributedModel(module)
    assert all(isinstance(layer, Mine) for layer in module.transformer.h)


def test_options_of_layers_that_are_replaced_alone_have_an_effect(job: Any) -> None:
    module = _make_gpt2_with_layers_to_replace()
    options = {"hidden_dropout_prob": 0.5, "use_alibi": True, "distribute_embedding": True, "initializer_range": 7.0}
    smp.set_tensor_parallelism(module.transformer.h, True, **options)
    with pytest.warns(UserWarning, match="for GPT2Block has no effect") as seen:
        smp.DistributedModel(module)
    assert {str(one.message).split()[0] for one in seen} >= {"distribute_embedding", "initializer_range"}
    (first, *_) = module.transformer.h
    assert first.output.hidden_dropout_prob == first.attention.hidden_dropout_prob == 0.5
    assert first.attention.slopes


def test_replaced_layers_have_hugging_faces_names_in_a_full_checkpoint(job: Any, tmp_path: Path) -> None:
    module = _make_gpt2_with_layers_to_replace()
    names = set(module.state_dict())
    model = smp.DistributedModel(module)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    smp.save_checkpoint(tmp_path, "tag", False, model)
    assert set(torch.load(tmp_path / "tag", weights_only=True)) == names
    nn.init.zeros_(module.transformer.h[1].output.dense1.weight)
    smp.resume_from_checkpoint(tmp_path, "tag", False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_replaced_layers_take_no_cache_and_no_cross_attention(job: Any) -> None:
    pytest.importorskip("transformers")
    *_, forward_hook, _ = smp.nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks()
    with pytest.raises(SMPUnsupportedError, match=r"GPT2Block does not take \w+\..*use_cache=False"):
        forward_hook(torch.ones(1, 3, 8), object())  # a cache
    with pytest.raises(SMPUnsupportedError, match="GPT2Block cannot be tensor-parallel: it has cross-attention"):
        smp.DistributedModel(_make_gpt2_with_layers_to_replace(add_cross_attention=True))
    old = _make_gpt2_with_layers_to_replace()
    for layer in old.transformer.h:
        del layer.attn.config  # releases before 4.44
    with pytest.raises(SMPUnsupportedError, match=r"does not hold its configuration\. Fix: update"):
        smp.DistributedModel(old)


HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", {"intermediate_size": 16}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gptj": ("GPTJForCausalLM", {"rotary_dim": 2}),
    "gptneo": ("GPTNeoForCausalLM", {"attention_types": [[["global"], 1]]}),
    "roberta": ("RobertaForMaskedLM", {"intermediate_size": 16}),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_each_published_translation_has_the_names_of_both_libraries(job: Any, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, more = HUGGING_FACE[name]
    cls = getattr(transformers, kind)
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_layers": 1, "num_heads": 2} if name == "gptneo" else {}
    with smp.model_creation(tensor_parallelism=True):
        module = cls(cls.config_class(**sizes, **more))
    theirs = {key: value.clone() for key, value in module.state_dict().items()}
    ours = smp.DistributedModel(module).state_dict()
    functions = vars(getattr(smp.nn.huggingface, name))
    published = [function for key, function in functions.items() if key.startswith("translate_") and "block" not in key]
    assert len(published) >= 2
    for translate in published:
        back = "_to_hf_" in translate.__name__
        given, wanted = (ours, theirs) if back else (theirs, ours)
        found = translate(given, max_seq_len=8)
        shared = {key for key in wanted if key.startswith("transformer.") and ".output.pre_layernorm." in key}
        assert set(wanted) - set(found) <= (shared if name == "gptj" else set())
        assert all(torch.equal(value, wanted[key]) for key, value in found.items()), translate.__name__


def test_an_encoder_takes_a_none_for_each_layer_and_no_mask_of_heads(job: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    encoder = smp.nn.huggingface.make_encoder(transformers.BertModel(config).encoder)
    states = torch.randn(2, 3, 8)
    assert encoder(states, None, head_mask=[None]).last_hidden_state.shape == (2, 3, 8)
    with pytest.raises(SMPUnsupportedError, match="DistributedEncoder does not take head_mask"):
        encoder(states, None, head_mask=[torch.ones(2)])


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_new"])
def test_an_output_layer_is_two_linear_modules_with_a_residual(job: Any, activation: str) -> None:
    layer = smp.nn.DistributedTransformerOutputLayer(8, 16, 0.0, activation, pre_layernorm=True)
    states = torch.randn(2, 3, 8)
    inner = nn.functional.linear(nn.functional.layer_norm(states, (8,)), layer.dense1.weight, layer.dense1.bias)
    active = {"gelu": nn.GELU(), "relu": nn.ReLU(), "gelu_new": nn.GELU(approximate="tanh")}[activation]
    output = nn.functional.linear(active(inner), layer.dense2.weight, layer.dense2.bias)
    torch.testing.assert_close(layer(states), nn.functional.layer_norm(states + output, (8,)))
    assert isinstance(layer, smp.nn.DistributedModule) and isinstance(layer.layernorm, smp.nn.FusedLayerNorm)
    with pytest.raises(SMPUnsupportedError, match="activation is 'silu'"):
        smp.nn.DistributedTransformerOutputLayer(activation="silu")


def test_an_embedding_begins_with_its_range_or_the_given_weights(job: Any) -> None:
    made = smp.nn.DistributedEmbedding(200, 32, padding_idx=3, initializer_range=0.5)
    assert not made.weight[3].any() and 0.45 < float(made.weight.detach()[4:].std()) < 0.55
    weight = torch.randn(5, 4)
    given = smp.nn.DistributedEmbedding(5, 4, _weight=weight)
    assert torch.equal(given(torch.tensor([[1, 4]])), weight[[1, 4]][None])


def test_a_transformer_with_both_layernorms_normalizes_its_input_and_output(job: Any) -> None:
    options: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_size": 4, "hidden_size": 8, "intermediate_size": 16,
        "attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
    }  # fmt: skip
    transformer = smp.nn.DistributedTransformer(2, pre_layernorm=True, post_layernorm=True, **options)
    states = torch.randn(2, 3, 8)
    inner = transformer.seq_layers((nn.functional.layer_norm(states, (8,)), None))[0]
    torch.testing.assert_close(transformer((states, None))[0], nn.functional.layer_norm(inner, (8,)))
    one = smp.nn.DistributedTransformer(1, post_layernorm=True, **options)
    torch.testing.assert_close(one((states, None))[0], one.seq_layers[0]((states, None))[0])


def test_a_module_with_two_names_is_in_the_state_dict_by_both(job: Any) -> None:
    module = nn.ModuleDict({"first": nn.Linear(2, 2)})
    module["second"] = module["first"]
    plain = {key: value.clone() for key, value in module.state_dict().items()}
    found = smp.DistributedModel(module).state_dict()
    assert list(found) == list(plain) and all(torch.equal(found[key], plain[key]) for key in plain)


def test_modules_are_replaced_with_degree_1_too(job: Any) -> None:
    assert not isinstance(nn.Linear(2, 2), smp.nn.FlashAttentionLayer)
    with smp.model_creation(tensor_parallelism=True):
        module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    smp.set_tensor_parallelism(module[2], False)
    value = torch.randn(4, 2)
    expected = module(value)
    model = smp.DistributedModel(module)
    assert [type(part) for part in module] == [smp.nn.DistributedLinear, nn.Tanh, nn.Linear]
    assert list(model.distributed_modules()) == [module[0]]
    torch.testing.assert_close(model(value), expected)
    assert get_distribution_axis(next(model.parameters())) is None  # each rank has all of it


def test_attention_without_parameters_equals_its_definition(job: Any) -> None:
    qkv = torch.randn(2, 5, 3, 4, 8)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(2, 3) / (8**0.5 * 3)
    hidden = ~torch.ones(5, 5, dtype=torch.bool).tril()
    attention = smp.nn.FlashAttentionLayer(0.0, scale_attn_by_layer_idx=True, layer_idx=2)
    torch.testing.assert_close(attention(qkv), scores.softmax(-1) @ value)
    found = attention(qkv, causal=True)
    torch.testing.assert_close(found, scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value)
    mask = torch.randn(2, 1, 1, 5)
    torch.testing.assert_close(attention(qkv, mask), (scores + mask).softmax(-1) @ value)


def test_alibi_adds_a_slope_of_the_distance_to_scores(job: Any) -> None:
    options: dict[str, Any] = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "post_layernorm": False}
    states, slopes = torch.randn(2, 6, 16), torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    torch.manual_seed(0)
    attention = smp.nn.DistributedAttentionLayer(4, 4, 16, pre_layernorm=True, use_alibi=True, **options)
    torch.manual_seed(0)
    plain = smp.nn.DistributedAttentionLayer(4, 4, 16, pre_layernorm=True, **options)
    distances = torch.arange(6.0)[:, None] - torch.arange(6.0)
    bias = -slopes[:, None, None] * distances
    torch.testing.assert_close(attention((states, None)), plain((states, bias)))
    with pytest.raises(SMPUnsupportedError, match="use_alibi with 3 heads"):
        smp.nn.DistributedAttentionLayer(3, 4, 12, use_alibi=True)
    with pytest.raises(SMPUnsupportedError, match="neither pre_layernorm nor post_layernorm"):
        smp.nn.DistributedTransformerLayer(post_layernorm=False)


@pytest.mark.parametrize("delayed", [False, True])
def test_models_without_initialization_get_new_weights(job: Any, delayed: bool, monkeypatch: Any) -> None:
    transformers = pytest.importorskip("transformers")
    job(delayed_parameter_initialization=delayed)
    monkeypatch.setattr(transformers.PreTrainedModel, "init_weights", lambda _: None)  # as AWS's scripts do
    config = transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=1, n_head=4, initializer_range=0.05)
    with smp.model_creation(tensor_parallelism=True):
        module = transformers.GPT2LMHeadModel(config)
    state = smp.DistributedModel(module).state_dict()
    for name in ("word_embedding.weight", "transformer.seq_layers.0.output.dense1.weight"):
        assert 0.04 < float(state[name].std()) < 0.06
    assert not state["transformer.seq_layers.0.attention.query.bias"].any()


def test_layers_of_t5_that_would_compute_something_else_are_refused(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=3)

    def wrap(change: Any = lambda _: None) -> Any:
        smp.state.model = None
        with smp.model_creation(tensor_parallelism=True, attention_in_fp32=True):
            module = transformers.T5EncoderModel(config)
        change(module.encoder.block[0].layer[0].SelfAttention)
        return smp.DistributedModel(module)

    with pytest.warns(UserWarning, match="attention_in_fp32 for T5Block has no effect"):
        model = wrap()
    ids = torch.ones(2, 4, dtype=torch.long)
    assert isinstance(model.get_module().encoder.block[0].layer[1].DenseReluDense.wo, smp.nn.DistributedModule)
    assert model(input_ids=ids).last_hidden_state.shape == (2, 4, 8)
    with pytest.raises(SMPUnsupportedError, match="output_attentions is given, and T5Attention has a part"):
        model(input_ids=ids, output_attentions=True)
    with pytest.raises(SMPUnsupportedError, match=r"its layer\.0\.SelfAttention\.other is a Linear that is not known"):
        wrap(lambda attention: attention.add_module("other", nn.Linear(2, 2)))
    group = smp.nn.tensor_group.TensorGroup(None, 0, 2, True)
    monkeypatch.setattr(smp.nn.tensor_group, "_current", group)
    with pytest.raises(SMPUnsupportedError, match=r"T5Attention\.n_heads has size 3, which 'tensor_parallel_degree' 2"):
        wrap()


def test_options_of_tensor_parallelism_warn_without_effect_and_have_no_typos(job: Any) -> None:
    with (
        pytest.warns(UserWarning, match="fused_softmax of smp.model_creation has no effect"),
        smp.model_creation(fused_softmax=True, attention_in_fp32=False, dtype=torch.float64),
    ):
        assert nn.Linear(1, 1).weight.dtype == torch.float64
    with pytest.raises(TypeError, match=r"'fused_sofmax'\. Did you mean 'fused_softmax'"):
        smp.model_creation(fused_sofmax=True).__enter__()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, o: smp.DistributedOptimizer(o, static_loss_scaling=2.0),  # type: ignore[call-arg]
            "static_loss_scale",
        ),
        (
            lambda m, o: smp.DistributedModel(m.module, trace_devices="gpu"),  # type: ignore[call-arg]
            "trace_device",
        ),
        (lambda m, o: smp.save({}, "f", partially=False), "partial"),  # type: ignore[call-arg]
        (lambda m, o: smp.load("f", partially=False), "partial"),  # type: ignore[call-arg]
        (lambda m, o: smp.save_checkpoint("p", "t", models=m), "model"),  # type: ignore[call-arg]
        (lambda m, o: smp.resume_from_checkpoint("p", partal=True), "partial"),  # type: ignore[call-arg]
        (lambda m, o: smp.set_activation_checkpointing(m, stategy="each"), "strategy"),  # type: ignore[call-arg]
    ],
)
def test_misspelt_arguments_are_type_errors(job: Any, call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"Did you mean '{message}'"):
        call(*wrapped())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trace_device": "cpu"}, "trace_device"),
        ({"trace_execution_times": True}, "trace_execution_times and trace_memory_usage"),
        ({"trace_memory_usage": True}, "trace_execution_times and trace_memory_usage"),
        ({"gradient_as_bucket_view": True}, "gradient_as_bucket_view"),
    ],
)
def test_arguments_of_the_model_without_effect_warn(job: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=f"{message} of smp.DistributedModel has no effect"):
        smp.DistributedModel(nn.Linear(1, 1), **arguments)


def test_other_arguments_without_effect_warn(job: Any, tmp_path: Any) -> None:
    model, optimizer = wrapped()
    with pytest.warns(UserWarning, match="pack_args_as_tuple has no effect"):
        smp.set_activation_checkpointing(model.module, pack_args_as_tuple=True)
    smp.save_checkpoint(tmp_path, "full", partial=False, model=model, translate_if_full=False)
    with pytest.warns(UserWarning, match="load_sharded_optimizer_state of smp.resume_from_checkpoint has no effect"):
        smp.resume_from_checkpoint(tmp_path, "full", partial=False, load_sharded_optimizer_state=False)
    with pytest.warns(UserWarning, match="The loss scale has no effect: it is for 'fp16'"):
        smp.DistributedOptimizer(optimizer.optimizer, dynamic_loss_scale=True)
    job(auto_partition=True)
    module = nn.Linear(1, 1)
    smp.set_partition(module, 0)
    with pytest.warns(UserWarning, match="smp.set_partition has no effect: 'auto_partition'"):
        smp.DistributedModel(module)


def test_a_full_checkpoint_can_be_translated(job: Any, tmp_path: Any) -> None:
    model, _ = wrapped()
    torch.save({f"other.{key}": value + 1 for key, value in model.state_dict().items()}, tmp_path / "tag")
    wanted = model.module[0].bias + 1  # type: ignore[index]
    rename = lambda found: {key.removeprefix("other."): value for key, value in found.items()}  # noqa: E731
    smp.resume_from_checkpoint(tmp_path, "tag", partial=False, translate_function=rename)
    assert torch.equal(model.module[0].bias, wanted)  # type: ignore[index]


class Runs:
    """An object whose pickle runs code when it is loaded: it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._path, "w")


@pytest.mark.parametrize("partial", [True, False])
def test_a_checkpoint_runs_no_code_unless_the_script_says_so(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partial: bool
) -> None:
    model, optimizer = wrapped()
    monkeypatch.delenv("SMP_TRUST_CHECKPOINTS", raising=False)
    model(torch.ones(2, 4))
    trace = tmp_path / "trace"
    with pytest.warns(
        UserWarning, match=r"user_content holds more than tensors.* \(\w+\.\w+\).*weights_only=False.*SMP_TRUST_CHECK"
    ):
        smp.save_checkpoint(tmp_path, "tag", partial, model, optimizer, Runs(trace))
    with pytest.raises(
        SMPRuntimeError, match=r"user_content\S* holds more than .*Fix: .*weights_only=False.*CHECKPOINTS=1"
    ):
        smp.resume_from_checkpoint(tmp_path, "tag", partial)
    assert not trace.exists()
    smp.resume_from_checkpoint(tmp_path, "tag", partial, weights_only=False).close()
    assert trace.exists()
    trace.unlink()
    monkeypatch.setenv("SMP_TRUST_CHECKPOINTS", "1")
    smp.resume_from_checkpoint(tmp_path, "tag", partial).close()
    assert trace.exists()
    with pytest.raises(SMPRuntimeError, match="holds more than"):
        smp.resume_from_checkpoint(tmp_path, "tag", partial, weights_only=True)
    monkeypatch.setenv("SMP_TRUST_CHECKPOINTS", "yes")
    with pytest.raises(SMPRuntimeError, match=r"SMP_TRUST_CHECKPOINTS is 'yes'\. Fix: set it to 1"):
        smp.resume_from_checkpoint(tmp_path, "tag", partial)


def test_no_file_of_a_checkpoint_runs_code(job: Any, tmp_path: Path) -> None:
    model, optimizer = wrapped()
    model(torch.ones(2, 4))
    smp.save_checkpoint(
        tmp_path, "tag", True, model, optimizer, {"steps": 3, "rates": [0.1, None], "seed": torch.ones(1)}
    )
    assert smp.resume_from_checkpoint(tmp_path, "tag")["steps"] == 3
    packed = io.BytesIO()
    torch.save(Runs(tmp_path / "trace"), packed)
    forged = torch.frombuffer(bytearray(packed.getvalue()), dtype=torch.uint8)
    file = tmp_path / "tag_partial" / "optimizer_0_0_0.safetensors"
    save_file({**load_file(file), "#rest": forged}, file)
    with pytest.raises(SMPRuntimeError, match=f"{file.name} holds more than tensors"):
        smp.resume_from_checkpoint(tmp_path, "tag")
    assert not (tmp_path / "trace").exists()


NOTES: dict[str, Any] = {
    "outside": "../elsewhere/tag",
    "absolute": "/etc/passwd",
    "long": "tag" * 1000,
    "lines": "a secret/of\nanother file",
}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
@pytest.mark.parametrize("kind", ["", "_partial"])
def test_the_newest_tag_leads_to_no_other_directory_and_shows_no_other_file(
    job: Any, tmp_path: Path, note: str, kind: str
) -> None:
    model, optimizer = wrapped()
    model(torch.ones(2, 4))
    smp.save_checkpoint(tmp_path / "elsewhere", "tag", True, model, optimizer)
    smp.save_checkpoint(tmp_path / "own", "tag", True, model, optimizer)
    (tmp_path / "other").write_text(note)
    (tmp_path / "own" / "newest_partial").unlink()
    (tmp_path / "own" / f"newest{kind}").unlink(missing_ok=True)
    (tmp_path / "own" / f"newest{kind}").symlink_to(tmp_path / "other")
    with pytest.raises(SMPRuntimeError, match=r"does not hold the tag.*Fix: ") as caught:
        smp.resume_from_checkpoint(tmp_path / "own")
    assert note not in str(caught.value)


STAGES: dict[str, str] = {
    "another stage": '{"partitions": 1, "stages": {"main": 99}}',
    "a negative stage": '{"partitions": 1, "stages": {"main": -1}}',
    "no number": '{"partitions": 1, "stages": {"main": NaN}}',
    "negative steps": '{"partitions": 1, "stages": {}, "steps": -5}',
    "steps without a number": '{"partitions": 1, "stages": {}, "steps": Infinity}',
    "a list": "[]",
    "nested": "[" * 100_000,
    "no stages": '{"partitions": 1, "stages": 3}',
}


@pytest.mark.parametrize("notes", STAGES.values(), ids=STAGES)
def test_forged_stages_of_a_checkpoint_are_an_error(job: Any, tmp_path: Path, notes: str) -> None:
    model, optimizer = wrapped()
    model(torch.ones(2, 4))
    smp.save_checkpoint(tmp_path, "tag", True, model, optimizer)
    (tmp_path / "tag_partial" / "stages.json").write_text(notes)
    with pytest.raises(SMPRuntimeError, match=r"stages\.json is damaged.*Fix: remove it"):
        smp.resume_from_checkpoint(tmp_path, "tag")


@pytest.mark.parametrize("rest", [None, {}, [1]], ids=["none", "no keys", "a list"])
def test_forged_options_of_an_optimizer_are_an_error(job: Any, tmp_path: Path, rest: object) -> None:
    model, optimizer = wrapped()
    model(torch.ones(2, 4))
    smp.save_checkpoint(tmp_path, "tag", True, model, optimizer)
    (path,) = (tmp_path / "tag_partial").glob("optimizer_*.safetensors")
    tensors = {"state/exp_avg/weight": torch.ones(1)}
    if rest is not None:
        torch.save(rest, stream := io.BytesIO())
        tensors["#rest"] = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
    save_file(tensors, path)
    with pytest.raises(SMPRuntimeError, match=r"#rest.*Fix: "):
        smp.resume_from_checkpoint(tmp_path, "tag")


LINKS = [
    ".tag_partial.unfinished",
    ".tag_partial.old",
    "tag_partial",
    "first_partial",
    *(f".{name}.PID.unfinished" for name in ("newest", "newest_partial", "tag", "newest_full")),
]


@pytest.mark.parametrize("name", LINKS)
def test_a_save_writes_through_no_link_and_is_not_stopped_by_one(job: Any, tmp_path: Path, name: str) -> None:
    model, optimizer = wrapped()
    model(torch.ones(2, 4))
    directory, victim = tmp_path / "own", tmp_path / "victim"
    directory.mkdir()
    if "partial" in name and "newest" not in name:
        victim.mkdir()
        (victim / "model_0.pt").write_text("precious")
        os.utime(victim, (0, 0))
    else:
        victim.write_text("precious")
    (directory / name.replace("PID", str(os.getpid()))).symlink_to(victim)
    for partial in (True, True, False):
        smp.save_checkpoint(
            directory, "tag", partial, model, optimizer, num_kept_partial_checkpoints=1 if partial else None
        )
        smp.resume_from_checkpoint(directory, "tag", partial)
    kept = victim / "model_0.pt" if victim.is_dir() else victim
    assert kept.read_text() == "precious"


def test_smp_load_loads_objects_if_the_script_says_so(job: Any, tmp_path: Path) -> None:
    smp.save({"rate": 0.1, "path": Path("somewhere")}, tmp_path / "any")
    with pytest.raises(SMPRuntimeError, match=r"any_0 holds more than tensors.*Fix: .*smp.load"):
        smp.load(tmp_path / "any")
    for how in ({"weights_only": False}, {"pickle_load_args": {"weights_only": False}}, {"pickle_module": own_pickle}):
        assert smp.load(tmp_path / "any", **how) == {"rate": 0.1, "path": Path("somewhere")}
    smp.save([torch.ones(2), {"a": (1, "b", None)}], tmp_path / "data")
    assert smp.load(tmp_path / "data")[1] == {"a": (1, "b", None)}


def test_with_one_partition_the_model_is_placed_at_once_and_steps_are_optional(job: Any) -> None:
    model, optimizer = wrapped()
    assert model.partitioned
    assert len(list(model.local_parameters())) == 4
    before = model(torch.ones(2, 4)).square().mean()
    model.backward(before)
    optimizer.step()
    assert model(torch.ones(2, 4)).square().mean() < before
    with pytest.raises(SMPConfigError, match="in partition 0 already, and cannot go to 1"):
        smp.set_partition(model.module[0], 1)  # type: ignore[index]


def test_parameters_constructed_late_reach_an_optimizer_wrapped_after_the_model(job: Any) -> None:
    half = torch.__version__ >= "2.2"
    job(delayed_parameter_initialization=True, fp16=half)
    with smp.model_creation(dtype=torch.float16 if half else None):
        module = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    assert module[0].weight.is_meta
    inner = torch.optim.SGD(module.parameters(), 0.1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(inner)
    assert {p.dtype for p in model.local_parameters()} == {torch.float16 if smp.state.cfg.fp16 else torch.float32}
    before = model(torch.ones(2, 100)).square().mean()
    model.backward(before)
    optimizer.step()
    assert model(torch.ones(2, 100)).square().mean() < before


def test_model_names_of_tensor_and_data_parallelism(job: Any) -> None:
    model, _ = wrapped()
    everything = list(model.named_parameters())
    assert list(model.distributed_modules()) == []
    assert not model.is_distributed_parameter(everything[0][1])
    assert [name for name, _ in model.default_reducer_named_parameters()] == [name for name, _ in everything]
    state = {**model.local_state_dict(), "_smp_is_partial": True}
    model.load_state_dict(state, same_partition_load=True)
    with model.join():
        model.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(SMPUnsupportedError, match="Fix: "), model.join(divide_by_initial_world_size=False):
        pass
    model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(SMPRuntimeError, match="has a communication hook already"):
        model.register_comm_hook(None, lambda state, bucket: None)


def test_optimizer_names_of_published_scripts(job: Any) -> None:
    job(bf16=True)
    model, optimizer = wrapped()
    model.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    saved = copy.deepcopy(optimizer.save_optimizer_backcompat(gather_if_shard=1))
    assert set(optimizer.save_optimizer_backcompat(fp32_states_only=True)) == set(saved) - {"state"}
    master = next(iter(optimizer.master_weights.copies.values()))
    wanted = master.clone()
    master.data.zero_()
    optimizer.load_optimizer_backcompat(saved, gather_if_shard=True)
    assert torch.equal(master, wanted)
    model.module[0].weight.data.fill_(2.0)  # type: ignore[index]
    optimizer.reload_model_params(model, optimizer)
    assert master.eq(2.0).all()
    optimizer.zero_grad(set_grads_to_None=True)
    assert all(parameter.grad is None for parameter in model.local_parameters())
    with pytest.raises(AttributeError, match=r"smp.DistributedOptimizer has no attribute 'stepp', nor has the SGD"):
        _ = optimizer.stepp
    with pytest.raises(AttributeError, match="'_global_grad_norm' is there with 'sharded_data_parallel_degree'"):
        _ = optimizer._global_grad_norm
    with pytest.raises(StepUsageError, match="update_master_grads"):
        optimizer.backward(torch.ones(()), update_master_grads=True)


def test_old_versions_of_torch_name_the_image_that_has_it(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from smdistributed.modelparallel.torch.pipeline import offloading
    from smdistributed.modelparallel.torch.script import sharding

    monkeypatch.setattr(sharding, "fully_shard", None)
    with pytest.raises(SMPUnsupportedError, match=r"needs FSDP2.*Fix: use the image pytorch-latest"):
        sharding.require_torch()
    monkeypatch.setattr(offloading, "torch_checkpoint", types.ModuleType("checkpoint"))
    with pytest.raises(SMPUnsupportedError, match=r"needs torch 2.1 or newer.*Fix: use the image pytorch-latest"):
        offloading.offload_activations(4)


def test_a_share_that_was_not_gathered_is_refused_where_all_is_wanted(job: Any) -> None:
    _, optimizer = wrapped()
    with pytest.raises(RuntimeError, match="gather_if_shard=True"):
        optimizer.load_optimizer_backcompat({"gathered": False}, gather_if_shard=True)


def test_a_dynamic_scale_follows_overflows() -> None:
    scale = LossScale(None, True, {"init_scale": 16.0, "scale_window": 2, "min_scale": 2.0, "delayed_shift": 2})
    seen = []
    for overflow in (True, True, False, True, False, False, True, True, True, True, True):
        scale.update(overflow)
        seen.append(scale.value)
    # The first overflow after a growth is forgiven; two steps without one double; never below min_scale.
    assert seen == [16.0, 8.0, 8.0, 4.0, 4.0, 8.0, 8.0, 4.0, 2.0, 2.0, 2.0]


def test_consecutive_hysteresis_forgives_after_every_good_step() -> None:
    options = {"init_scale": 16.0, "delayed_shift": 2, "consecutive_hysteresis": True}
    scale = LossScale(1.0, True, options)
    for overflow in (True, False, True, False, True):
        scale.update(overflow)
    assert scale.value == 16.0
    scale.update(True)
    assert scale.value == 8.0
    other = LossScale(1.0, True, options)
    other.load_state_dict(scale.state_dict())
    assert other.state_dict() == scale.state_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale_windw": 2}, "Did you mean 'scale_window'"),
        ({"delayed_shift": 0}, "'delayed_shift' of dynamic_loss_args is 0. Allowed: a number from 1 on"),
    ],
)
def test_wrong_arguments_of_the_scale_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SMPConfigError, match=message):
        LossScale(1.0, True, arguments)


@pytest.mark.parametrize(("beside", "rival"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_fused_adam_steps_as_torchs(beside: bool, rival: Any) -> None:
    first, second = (nn.Parameter(torch.tensor([3.0, -4.0])) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
    steps = FusedAdam([first], adam_w_mode=beside, **options), rival([second], **options)
    for gradient in ([0.3, -0.4], [-1.0, 2.0], [0.5, 0.0]):
        for parameter, optimizer in zip((first, second), steps):
            parameter.grad = torch.tensor(gradient)
            optimizer.step()
        torch.testing.assert_close(first, second)


def test_lamb_steps_by_the_size_of_a_parameter() -> None:
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    parameter.grad = torch.tensor([0.3, -0.4])
    FusedLAMB([parameter], lr=0.1, weight_decay=0.01, max_grad_norm=0.25, eps=0.0).step()
    # At the first step both moments, corrected, leave the gradient's sign; what decays is added to it.
    update = torch.tensor([1.0 + 0.03, -1.0 + 0.04])
    wanted = torch.tensor([3.0, 4.0]) - 0.1 * 5.0 / update.norm() * update
    assert torch.allclose(parameter, wanted, atol=1e-6)


@pytest.mark.parametrize(("before", "size"), [(0.5, 0.5), (0.0, 1.0)])
def test_lamb_scales_a_step_to_every_parameter_but_zeros(before: float, size: float) -> None:
    parameter = nn.Parameter(torch.tensor([before]))
    parameter.grad = torch.tensor([-0.3])
    FusedLAMB([parameter], lr=0.1, weight_decay=0.01, eps=0.0).step()
    assert parameter.item() == pytest.approx(before + 0.1 * size)  # the step has the size of the parameter


@pytest.mark.parametrize(("norm_type", "first", "second"), [(2, 0.5, 0.52**0.5), (0, 0.4, 0.64 * 0.4 + 0.36 * 0.8)])
def test_novograd_averages_the_norms_of_gradients(norm_type: int, first: float, second: float) -> None:
    """The 2-norms are 0.5 and 1, of which the squares are averaged, and the greatest elements 0.4 and 0.8."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = FusedNovoGrad(
        [parameter], lr=1.0, betas=(0.0, 0.64), bias_correction=False, eps=0.0, norm_type=norm_type
    )
    for norm, gradient in ((first, torch.tensor([0.3, -0.4])), (second, torch.tensor([0.6, -0.8]))):
        before, parameter.grad = parameter.detach().clone(), gradient
        optimizer.step()
        assert torch.allclose(before - parameter, gradient / norm)


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_gradients_are_removed_or_filled_with_zeros(kind: Any) -> None:
    for removes in (True, False):
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        kind([parameter], set_grad_none=removes).zero_grad()
        assert parameter.grad is None if removes else parameter.grad.tolist() == [0, 0]


def test_novograd_steps_by_the_gradients_norm() -> None:
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = FusedNovoGrad([parameter], lr=0.1, bias_correction=False, eps=0.0, weight_decay=0.5)
    parameter.grad = torch.tensor([0.3, -0.4])  # its norm, 0.5, is the first moving norm
    optimizer.step()
    wanted = torch.tensor([3.0, 4.0]) - 0.1 * (0.1 * torch.tensor([0.6, -0.8]) + 0.5 * torch.tensor([3.0, 4.0]))
    assert torch.allclose(parameter, wanted, atol=1e-6)
    with pytest.raises(SMPConfigError, match="amsgrad"):
        FusedNovoGrad([parameter], amsgrad=True)


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_groups_count_their_steps(kind: Any) -> None:
    """The schedule of AWS's BERT script reads the number there; without it the learning rate stays the first one."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = kind([{"params": [used]}, {"params": [unused]}])
    for _ in range(2):
        used.grad = torch.ones(2)
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]
    other = kind([{"params": [used]}, {"params": [unused]}])
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert [group["step"] for group in other.param_groups] == [3, 3]


def test_losses_that_were_not_scaled_are_refused(job: Any) -> None:
    """Their gradients would be divided by the loss scale, and the job would end without having trained."""
    job(fp16=True)
    model, optimizer = wrapped(static_loss_scale=1024.0)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(StepUsageError, match=r"call model\.backward\(loss\) instead of loss\.backward\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    model.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()


def test_sums_over_microbatches_are_refused_where_means_are_asked_for(job: Any) -> None:
    job(microbatches=2)
    model, optimizer = wrapped()
    summed = smp.step(lambda model, data: model(data).sum().backward())
    evaluated = smp.step(lambda model, data: model(data).sum().detach())
    averaged = smp.step(lambda model, data: model.backward(model(data).sum()))
    evaluated(model, torch.ones(2, 4))
    with pytest.raises(StepUsageError, match=r"sums over the microbatches instead of means. Fix: call model\.backward"):
        summed(model, torch.ones(2, 4))
    optimizer.zero_grad()
    averaged(model, torch.ones(2, 4))
    evaluated(model, torch.ones(2, 4))


@pytest.mark.parametrize("how", ["torch", "model", "copies"])
def test_clipping_with_a_loss_scale_is_of_gradients_without_it(job: Any, how: str) -> None:
    """By the scaled ones every step would be divided by the scale, and nothing would train."""
    job(fp16=True)
    model, optimizer = wrapped(static_loss_scale=1024.0)
    for _ in range(2):
        optimizer.zero_grad()
        model.backward(model(torch.ones(2, 4)).sum())
        if how == "model":
            found = float(model.clip_grad_norm_(0.5))
        else:
            given = model.parameters() if how == "torch" else optimizer.param_groups[0]["params"]
            found = float(torch.nn.utils.clip_grad_norm_(given, 0.5))
        assert 1.0 < found < 20.0
        before = [master.clone() for master in optimizer.master_weights.copies.values()]
        optimizer.step()
        moved = sum(
            float((a - b).detach().square().sum()) for a, b in zip(before, optimizer.master_weights.copies.values())
        )
        assert abs(moved**0.5 - 0.05) < 1e-4  # the learning rate, 0.1, times the norm


def test_a_gradient_of_a_step_before_is_not_applied_again(job: Any) -> None:
    job(bf16=True)
    model, optimizer = wrapped()
    model.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    model.zero_grad()
    model.backward(model.module[0](torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())  # type: ignore[index]
    unused = list(optimizer.master_weights.copies.values())[2].clone()
    optimizer.step()
    assert torch.equal(unused, list(optimizer.master_weights.copies.values())[2])


def test_gradients_reset_by_hand_after_a_step_was_left_out_are_not_taken_for_new_ones(job: Any) -> None:
    job(bf16=True)
    model, optimizer = wrapped()
    model.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.update_master_grads()  # as GradScaler does, which then leaves out the step
    for parameter in model.parameters():
        parameter.grad = None
    model.backward(model(torch.ones(2, 4)).square().mean() * 0.0)
    before = [master.clone() for master in optimizer.master_weights.copies.values()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.master_weights.copies.values()))


def test_groups_added_while_training_have_copies_too(job: Any) -> None:
    job(bf16=True)
    model, optimizer = wrapped()
    extra = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    model.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.full((2,), 1e-3, dtype=torch.bfloat16)  # too small a change for bfloat16
    optimizer.step()
    assert optimizer.master_weights.copies[extra][0] < 1.0


def test_a_second_optimizer_is_refused_where_the_first_would_not_train(job: Any) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    for _ in range(2):
        smp.DistributedOptimizer(torch.optim.SGD(first.parameters(), 0.1))
        smp.DistributedOptimizer(torch.optim.SGD(second.parameters(), 0.1))
    job(fp16=True)
    smp.DistributedOptimizer(torch.optim.SGD(first.parameters(), 0.1))
    smp.DistributedOptimizer(torch.optim.SGD(first.parameters(), 0.2))  # the same parameters again: it replaces that
    with pytest.raises(SMPUnsupportedError, match="Fix: give one optimizer all parameters"):
        smp.DistributedOptimizer(torch.optim.SGD(second.parameters(), 0.1))
