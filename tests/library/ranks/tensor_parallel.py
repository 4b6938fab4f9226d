"""A rank of a tensor-parallel job: python tensor_parallel.py CASE [ARGUMENT ...], with mp_parameters of the launch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn.module import split_of, take_share
from smdistributed.modelparallel.torch.utils import get_distribution_axis

STEPS, BATCH, TOLERANCE = 20, 16, 1e-6


class Mlp(nn.Module):
    """An embedding and linear layers; one shares its weight, and one has a size that 2 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24, padding_idx=0)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24, bias=False)
        self.odd = nn.Linear(24, 7)
        self.back = nn.Linear(7, 24)
        self.norm = nn.LayerNorm(24)
        self.tied, self.head = nn.Linear(24, 24), nn.Linear(24, 24)
        self.head.weight = self.tied.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(functional.gelu(self.up(self.norm(hidden))))
        hidden = hidden + self.back(torch.tanh(self.odd(hidden)))
        found: torch.Tensor = self.head(torch.tanh(self.tied(hidden)))
        return found.sum(-1)


def batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randint(0, 50, (BATCH, 5), generator=generator), torch.randn(BATCH, 5, generator=generator))
        for _ in range(count)
    ]


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a batch: by replica, or by replica of the whole model with `prescaled_batch`."""
    if smp.state.cfg.prescaled_batch:
        return tensor.chunk(smp.rdp_size())[smp.rdp_rank()]
    return tensor.chunk(smp.dp_size())[smp.dp_rank()]


@smp.step
def train_step(model: Any, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = functional.mse_loss(model(tokens), target)
    model.backward(loss)
    return loss


def plain_run(module: nn.Module, clip: float, make: Callable[..., Any], every: int = 1) -> list[float]:
    optimizer, losses = make(module.parameters()), []
    for number, (tokens, target) in enumerate(batches()):
        if number % every == 0:
            optimizer.zero_grad()
        loss = functional.mse_loss(module(tokens), target)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean_over_replicas(value: torch.Tensor) -> float:
    return float(sum(smp.allgather(value.item(), smp.DP_GROUP)) / smp.dp_size())


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=10 * tolerance)


def trains_as_one_process() -> None:
    """Losses, clipped updates, joined parameters and the optimizer's state equal those of one process.

    Every second step adds to the gradients of the step before.
    """
    torch.manual_seed(0)
    plain = Mlp()
    whole = copy.deepcopy(plain)
    expected = plain_run(whole, 0.5, lambda parameters: torch.optim.AdamW(parameters, 1e-2), every=2)
    smp.set_tensor_parallelism(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(plain.parameters(), 1e-2))
    model = smp.DistributedModel(plain)
    names = {name for name, module in model.module.named_modules() if isinstance(module, smp.nn.DistributedModule)}
    assert names == {"embed", "up", "down", "odd"}, names
    losses = []
    for number, (tokens, target) in enumerate(batches()):
        if number % 2 == 0:
            optimizer.zero_grad()
        loss = train_step(model, own_rows(tokens), own_rows(target)).reduce_mean()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(mean_over_replicas(loss))
    close(torch.tensor(losses), torch.tensor(expected))
    for name, value in model.state_dict().items():
        close(value, whole.state_dict()[name], 1e-5)
    shares = [name for name, p in model.local_named_parameters() if model.is_distributed_parameter(p)]
    assert (len(shares) > 0) or smp.pp_size() > 1


class Branch(nn.Module):
    """A part of the second stage, with a part of it on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner = nn.Linear(24, 24), nn.Sequential(nn.Linear(24, 24), nn.Tanh())
        smp.set_partition(self.inner, 0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.up(hidden) + self.inner(hidden)
        return found


class Forked(nn.Module):
    """Two branches on the second stage: their backwards call the first one at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 24), nn.Linear(24, 24)
        self.left, self.right = Branch(), Branch()
        for branch in (self.left, self.right):
            smp.set_partition(branch, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        found: torch.Tensor = self.head(self.left(hidden) + torch.tanh(self.right(hidden)))
        return found.sum(-1)


def trains_branches() -> None:
    """Several microbatches are in flight, and branches call further stages: as in one process."""
    trains_as_alone(Forked(), lambda parameters: torch.optim.AdamW(parameters, 1e-2))


def fails_on_a_rank_that_follows() -> None:
    """The step raises the error there, and an error on all other ranks, also of the other pipeline."""
    model, _ = wrapped()
    tokens, target = map(own_rows, batches(1)[0])
    train_step(model, tokens, target)
    fails = smp.tp_rank() == 1 and smp.pp_rank() == 0
    if fails:
        model.module.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        train_step(model, tokens, target)
    except Exception as error:
        assert isinstance(error, ZeroDivisionError) is fails, error
    else:
        raise AssertionError("no error")


def trains_with_norms() -> None:
    """Optimizers that use norms of whole parameters, and of all gradients, train as in one process."""
    trains_as_alone(Mlp(), lambda parameters: smp.optimizers.FusedLAMB(parameters, 1e-2, max_grad_norm=0.2))
    smp.state.model = smp.state.optimizer = None
    trains_as_alone(Mlp(), lambda parameters: smp.optimizers.FusedNovoGrad(parameters, 1e-2, norm_type=0))
    smp.state.model = smp.state.optimizer = None
    trains_as_alone(Mlp(), lambda parameters: smp.optimizers.FusedNovoGrad(parameters, 1e-2))


def trains_as_alone(plain: nn.Module, make: Callable[..., Any]) -> None:
    """Losses and parameters equal those of one process."""
    torch.manual_seed(0)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.2)
    whole = copy.deepcopy(plain)
    expected = plain_run(whole, 0.5, make)
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(make(model.parameters()))
    losses = []
    for tokens, target in batches():
        optimizer.zero_grad()
        loss = train_step(model, own_rows(tokens), own_rows(target)).reduce_mean()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(mean_over_replicas(loss))
    close(torch.tensor(losses), torch.tensor(expected))
    for name, value in model.state_dict().items():
        close(value, whole.state_dict()[name], 1e-5)


def wrapped(rate: float = 1e-2) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Mlp()
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), rate))


def run_steps(model: Any, optimizer: Any, begin: int, end: int) -> list[float]:
    losses = []
    for tokens, target in batches()[begin:end]:
        optimizer.zero_grad()
        losses.append(mean_over_replicas(train_step(model, own_rows(tokens), own_rows(target)).reduce_mean()))
        optimizer.step()
    return losses


def saves(directory: str) -> None:
    """Saves partial and full checkpoints after 5 steps, and the losses of the next 5."""
    model, optimizer = wrapped()
    refuses(lambda: model.register_comm_hook(None, print), "_parallel_degree' is above 1")
    run_steps(model, optimizer, 0, 5)
    for partial in (True, False):
        smp.save_checkpoint(directory, "five", partial, model, optimizer)
    smp.save(model.local_state_dict(), f"{directory}/local")
    if smp.rank() == 0:
        content = torch.load(f"{directory}/five", weights_only=True)
        assert content["up.weight"].shape == (48, 24)
        assert {path.name for path in Path(directory).glob("local_*")} >= {"local_0_0"}
    losses = run_steps(model, optimizer, 5, 10)
    if smp.rank() == 0:
        torch.save(losses, f"{directory}/losses")


def resumes(directory: str) -> None:
    """Both kinds of checkpoints continue with the same losses."""
    model, optimizer = wrapped()
    for partial in (True, False):
        smp.resume_from_checkpoint(directory, "five", partial)
        losses = run_steps(model, optimizer, 5, 10)
        close(torch.tensor(losses), torch.tensor(torch.load(f"{directory}/losses")))


def trains_in_half_precision() -> None:
    """The loss falls as without shares, and the norm before clipping is that of all shares."""
    torch.manual_seed(0)
    plain = Mlp()
    whole = copy.deepcopy(plain)
    model, optimizer = wrapped()
    tokens, target = batches()[0]
    torch.autograd.backward(functional.mse_loss(whole(tokens), target))
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    optimizer.zero_grad()
    train_step(model, own_rows(tokens), own_rows(target))
    norm = optimizer.clip_master_grads(1.0)
    assert abs(norm - expected.item()) < 0.03 * expected.item(), (norm, expected)
    losses = [sum(run_steps(model, optimizer, 0, 20)) for _ in range(2)]
    assert losses[1] < 0.9 * losses[0], losses


class Doubled(nn.Module):
    """A script's own module, with other arguments than its tensor-parallel version."""

    def __init__(self, size: int, *, factor: float = 2.0) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.factor = factor

    def forward(self, value: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
        return {"out": self.inner(value * scale) * self.factor}


class DistributedDoubled(smp.nn.DistributedModule):
    def __init__(self, size: int, factor: float, bias: bool = True) -> None:
        super().__init__()
        self.inner, self.factor = smp.nn.DistributedLinear(size, size, bias), factor

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(value)
        return found * self.factor


def registers() -> None:
    """Hooks translate arguments and outputs; options win over the hook's; optimizers from before are refused."""
    smp.tp_register(
        DistributedDoubled,
        init_hook=lambda size, *, factor=2.0: ((size, factor), {"bias": True}),
        forward_hook=lambda value, *, scale: ((value * scale,), {}),
        return_hook=lambda output: {"out": output},
    )(Doubled)
    with smp.tensor_parallelism(bias=False):
        module = nn.Sequential(Doubled(8, factor=3.0))
        with smp.tensor_parallelism(False):
            module.append(nn.Linear(8, 8))
    early = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1))
    model = smp.DistributedModel(module)
    replaced: Any = module[0]
    assert isinstance(replaced, DistributedDoubled) and replaced.inner.bias is None and replaced.factor == 3.0
    assert type(module[1]) is nn.Linear
    assert get_distribution_axis(replaced.inner.weight) == 1
    assert get_distribution_axis(module[1].weight) is None
    value = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    weight = model.state_dict()["0.inner.weight"]
    close(replaced(value, scale=0.5)["out"], 3.0 * functional.linear(value * 0.5, weight))
    refuses(early.step, "create the optimizer after smp.DistributedModel")
    smp.state.optimizer = None
    norms = smp.DistributedOptimizer(type("LARS", (torch.optim.SGD,), {})(model.parameters(), 0.1))
    refuses(norms.step, "LARS uses the norms of whole parameters")
    refuses(lambda: smp.nn.DistributedLinear(7, 2), "'tensor_parallel_degree' 2 does not divide")
    refuses(lambda: smp.nn.DistributedEmbedding(8, 4, sparse=True), "leave the embedding out")


def refuses(action: Callable[[], Any], message: str) -> None:
    try:
        action()
    except smp.exceptions.SMPError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"no error with {message!r}")


class Attention(nn.Module):
    """AWS's published reference of DistributedAttentionLayer, with a residual in any case."""

    def __init__(self, size: int, heads: int, causal: bool, pre: bool, post: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.dense = (nn.Linear(size, size) for _ in range(4))
        self.pre_layernorm = nn.LayerNorm(size) if pre else None
        self.layernorm = nn.LayerNorm(size) if post else None

    def forward(self, hidden: torch.Tensor, cross: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        source = normed if cross is None else cross
        query, key, value = (
            layer(given).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, given in ((self.query, normed), (self.key, source), (self.value, source))
        )
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        if self.causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -1e9)
        context = (scores + mask).softmax(-1) @ value
        output = hidden + self.dense(context.transpose(1, 2).flatten(2))
        return output if self.layernorm is None else self.layernorm(output)  # type: ignore[no-any-return]


class Output(nn.Module):
    """AWS's published reference of DistributedTransformerOutputLayer, with a residual in any case."""

    def __init__(self, size: int, pre: bool, post: bool) -> None:
        super().__init__()
        self.dense1, self.dense2 = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.pre_layernorm = nn.LayerNorm(size) if pre else None
        self.layernorm = nn.LayerNorm(size) if post else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        output = hidden + self.dense2(functional.gelu(self.dense1(normed)))
        return output if self.layernorm is None else self.layernorm(output)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, size: int, heads: int, causal: bool, cross: bool, pre: bool, post: bool) -> None:
        super().__init__()
        self.attention, self.output = Attention(size, heads, causal, pre, post), Output(size, pre, post)
        self.cross_attention = Attention(size, heads, False, pre, post) if cross else None

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
        hidden = self.attention(hidden, None, mask)
        if self.cross_attention is not None:
            hidden = self.cross_attention(hidden, cross, mask)
        return self.output(hidden)  # type: ignore[no-any-return]


class Holder(nn.Module):
    """A transformer layer, as a script would hold it."""

    def __init__(self, layer: nn.Module, cross: bool) -> None:
        super().__init__()
        self.layer, self.cross = layer, cross

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
        given = (hidden, cross, mask, mask) if self.cross else (hidden, mask)
        return self.layer(given)[0]  # type: ignore[no-any-return]


@smp.step
def layer_step(model: Any, *given: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(*given)
    model.backward(output.square().mean())
    return output


def is_as_published(causal: bool, cross: bool, pre: bool, post: bool) -> None:
    """Outputs and gradients of a layer equal those of the published reference, which has its state dict."""
    torch.manual_seed(1)
    plain = Layer(16, 4, causal, cross, pre, post)
    smp.state.model = smp.state.optimizer = None
    layer = smp.nn.DistributedTransformerLayer(
        4, 4, 16, 64, 0.0, 0.0, causal_mask_size=8 if causal else None,
        add_cross_attention=cross, pre_layernorm=pre, post_layernorm=post,
    )  # fmt: skip
    model = smp.DistributedModel(Holder(layer, cross))
    model.load_state_dict({f"layer.{name}": value for name, value in plain.state_dict().items()})
    generator = torch.Generator().manual_seed(3)
    hidden, other = torch.randn(2, 8, 6, 16, generator=generator)
    mask = torch.zeros(8, 1, 1, 6).masked_fill(torch.rand(8, 1, 1, 6, generator=generator) < 0.2, -1e9)
    mask[..., 0] = 0.0
    expected = plain(hidden, mask, other)
    torch.autograd.backward(expected.square().mean())
    found = layer_step(model, *map(own_rows, (hidden, mask, other))).concat()
    close(found, own_rows(expected), 1e-5)
    gradients = {f"layer.{name}": p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.local_named_parameters():
        split, gradient = split_of(parameter), gradients[name]
        assert gradient is not None and parameter.grad is not None
        close(parameter.grad, gradient if split is None else take_share(gradient, split), 1e-5)


def transformer_layers() -> None:
    for causal, cross, pre, post in (
        (True, False, True, False),
        (False, True, False, True),
        (False, False, True, True),
    ):
        is_as_published(causal, cross, pre, post)


def language_model() -> None:
    """A GPT trains as its own copy does with degree 1, with a split embedding and checkpointed layers."""
    from smdistributed.modelparallel.torch.nn import tensor_group

    options: dict[str, Any] = {
        "num_layers": 2, "num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16,
        "intermediate_size": 32, "vocab_size": 50, "num_positions": 8, "attention_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0, "causal_mask_size": 8, "pre_layernorm": True, "post_layernorm": False,
        "num_token_types": 2,
    }  # fmt: skip
    own = tensor_group.tensor_group()
    torch.manual_seed(5)
    tensor_group.set_tensor_group(tensor_group.TensorGroup(None, 0, 1, True))
    plain = smp.nn.DistributedTransformerLMHead(**options)
    tensor_group.set_tensor_group(own)
    model = smp.DistributedModel(smp.nn.DistributedTransformerLMHead(**options, distribute_embedding=True))
    model.load_state_dict(plain.state_dict())
    layers: Any = model.get_module().transformer
    smp.set_activation_checkpointing(layers.seq_layers)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 1e-2))
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 50, (8, 8), generator=generator)
    mask = (torch.rand(8, 8, generator=generator) < 0.2).long()
    mask[:, 0] = 0

    @smp.step
    def step(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        loss, _ = model((ids, mask, ids % 2, None, ids))
        model.backward(loss)
        return loss  # type: ignore[no-any-return]

    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(mean_over_replicas(step(model, own_rows(ids), own_rows(mask)).reduce_mean()))
        optimizer.step()
    tensor_group.set_tensor_group(tensor_group.TensorGroup(None, 0, 1, True))
    other, expected = torch.optim.AdamW(plain.parameters(), 1e-2), []
    for _ in range(5):
        other.zero_grad()
        loss, _ = plain((ids, mask, ids % 2, None, ids))
        torch.autograd.backward(loss)
        other.step()
        expected.append(loss.item())
    close(torch.tensor(losses), torch.tensor(expected))


def normalizes() -> None:
    """DistributedLayerNorm equals torch's, with its gradients."""
    torch.manual_seed(2)
    plain = nn.LayerNorm(12)
    nn.init.normal_(plain.weight)
    value = torch.randn(8, 3, 12)
    model = smp.DistributedModel(nn.Sequential(smp.nn.DistributedLayerNorm(12)))
    model.load_state_dict({f"0.{name}": tensor for name, tensor in plain.state_dict().items()})
    given = own_rows(value).requires_grad_()
    whole = value.clone().requires_grad_()
    output, expected = model(given), plain(whole)
    close(output, own_rows(expected))
    torch.autograd.backward(expected.pow(3).mean())
    model.backward(output.pow(3).mean())
    assert given.grad is not None and whole.grad is not None and plain.weight.grad is not None
    close(given.grad, own_rows(whole.grad) * (len(value) / len(given)))
    gradient = next(model.local_parameters()).grad
    assert gradient is not None
    close(gradient, plain.weight.grad.chunk(2)[smp.tp_rank()])


def hugging_face_models() -> dict[str, Callable[[], Any]]:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        DeiTConfig,
        DeiTForImageClassification,
        GPT2Config,
        GPT2LMHeadModel,
        GPTJConfig,
        GPTJForCausalLM,
        GPTNeoConfig,
        GPTNeoForCausalLM,
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        MT5Config,
        MT5ForConditionalGeneration,
        T5Config,
        T5ForConditionalGeneration,
        ViTConfig,
        ViTForImageClassification,
    )

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    old = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    local: dict[str, Any] = {"attention_types": [[["global", "local"], 1]], "window_size": 3}
    t5: dict[str, Any] = {
        "vocab_size": 50, "d_model": 16, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6, "decoder_start_token_id": 0,
    }  # fmt: skip
    image: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
        "patch_size": 4, "num_labels": 10,
    }  # fmt: skip
    return {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**old, scale_attn_by_inverse_layer_idx=True)),
        "gptj": lambda: GPTJForCausalLM(GPTJConfig(**old, rotary_dim=2)),
        "gptneo": lambda: GPTNeoForCausalLM(GPTNeoConfig(**sizes, num_layers=2, num_heads=4, **local)),
        "gptneox": lambda: GPTNeoXForCausalLM(
            GPTNeoXConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, rotary_pct=0.5)
        ),
        "bert": lambda: BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)),
        "t5": lambda: T5ForConditionalGeneration(T5Config(**t5)),
        "t5-gated": lambda: T5ForConditionalGeneration(T5Config(**t5, feed_forward_proj="gated-gelu")),
        "mt5": lambda: MT5ForConditionalGeneration(MT5Config(**t5)),
        "vit": lambda: ViTForImageClassification(ViTConfig(**image)),
        "deit": lambda: DeiTForImageClassification(DeiTConfig(**image)),
    }


def hugging_face_batch(name: str) -> dict[str, torch.Tensor]:
    """Named arguments of a model, with 8 rows."""
    generator = torch.Generator().manual_seed(7)
    if name in ("vit", "deit"):
        return {"pixel_values": torch.randn(8, 3, 8, 8, generator=generator), "labels": torch.arange(8)}
    ids = torch.randint(2, 50, (8, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


@smp.step
def hugging_face_step(model: Any, **batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(**batch)["loss"]
    model.backward(loss)
    return loss


@smp.step
def hugging_face_logits(model: Any, **batch: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(**batch)["logits"].detach()
    return logits


def trains_hugging_face(name: str, directory: str) -> None:
    """Losses equal the plain model's, and a full checkpoint is one of the plain model, which both load."""
    torch.manual_seed(0)
    plain = hugging_face_models()[name]().eval()  # without dropout
    for parameter in plain.parameters():
        nn.init.normal_(parameter, float(parameter.dim() == 1), 0.2)
    with smp.model_creation(tensor_parallelism=True):
        given = hugging_face_models()[name]().eval()
    given.load_state_dict(plain.state_dict())
    model = smp.DistributedModel(given)
    modules = model.get_module().named_modules()
    layers = {"t5": ".EncDecAttention.", "t5-gated": ".wi_1", "vit": ".layer"}
    layer = {**layers, "mt5": layers["t5"], "deit": layers["vit"]}.get(name, "seq_layers.")
    assert any(layer in key for key, part in modules if isinstance(part, smp.nn.DistributedModule))
    # Adam would divide the gradients of keys' biases, which are 0 but for rounding, by themselves.
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.02))
    other = torch.optim.SGD(plain.parameters(), 0.02)
    batch = hugging_face_batch(name)
    own = {key: own_rows(tensor) for key, tensor in batch.items()}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mean_over_replicas(hugging_face_step(model, **own).reduce_mean())
        optimizer.step()
        other.zero_grad()
        expected = plain(**batch)["loss"]
        torch.autograd.backward(expected)
        other.step()
        close(torch.tensor(loss), expected.detach(), 1e-5)
    smp.save_checkpoint(directory, name, False, model)
    saved = torch.load(f"{directory}/{name}", weights_only=True)
    assert set(saved) == set(plain.state_dict())
    for key, value in plain.state_dict().items():
        close(saved[key], value, 1e-5)
    loaded = hugging_face_models()[name]().eval()
    loaded.load_state_dict(saved)
    close(hugging_face_logits(model, **own).concat(), own_rows(loaded(**batch)["logits"].detach()), 1e-5)
    before = model.state_dict()
    smp.resume_from_checkpoint(directory, name, False)
    smp.save_checkpoint(directory, name, True, model)
    smp.resume_from_checkpoint(directory, name, True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


if __name__ == "__main__":
    smp.init({})
    globals()[sys.argv[1]](*sys.argv[2:])
