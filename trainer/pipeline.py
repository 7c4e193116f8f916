"""From a configuration to what the planner reckons with: the stages of its pipeline in bytes and seconds.

Closed form, without a device: what is assumed is said. Imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import cache

import psutil
import yaml

from memory.planner.costs import LayerCost, Rates, closed_form, weight_elements, with_seconds
from memory.planner.pipeline import Pipeline
from memory.planner.stage import Head, Stage
from models.config import LossHead, Normalization, Position
from models.flops import flops_per_token
from trainer.calibration import Calibration, load_calibration
from trainer.config.schema import Config, HardwareConfig, OptimizerName
from trainer.config.search_path import CONF
from trainer.shape import layer_chunks, layer_shape, loss_head, loss_head_bytes

#: shares of the data sheet's figures that a step reaches, measured on an H200 with Transformer Engine in bf16
_LINEAR_SHARE, _PRODUCT_SHARE, _ATTENTION_SHARE = 0.60, 0.78, 0.50
_LINK_ALONE, _LINK_BOTH_WAYS = 0.86, 0.78
#: device memory traffic of element-wise kernels, bytes for each FLOP of the peak
_BYTES_PER_FLOP = 1 / 300
#: between the ranks of a node (NVLink), and between nodes, each way, a GPU
_PEER_GBPS, _NETWORK_GBPS = 350.0, 40.0
#: of cuBLAS and Transformer Engine on a GPU
_WORKSPACE_BYTES = 64 << 20
#: without a figure: a CPU's fp32 peak and its memory's copying
_CPU_TFLOPS, _CPU_GBPS = 0.1, 5.0
#: bytes that the optimizer's step reads and writes for each element of its state
_UPDATE_BYTES = 32
#: of device memory traffic that loss and softmax take for each byte of fp32 logits, forward and backward each
_HEAD_PASSES = 3


@dataclass(frozen=True)
class Setting:
    """A configuration as the planner sees it."""

    pipeline: Pipeline
    hardware: HardwareConfig
    processes: int
    data_parallel: int
    #: model FLOPs of a step over all processes
    step_flops: float
    peak_flops: float
    assumptions: tuple[str, ...]

    def mfu(self, step_s: float) -> float:
        return self.step_flops / (step_s * self.peak_flops * self.processes)


def make_setting(config: Config, has_cuda: bool, calibration: Calibration | None = None) -> Setting:
    """has_cuda: the run that is planned is one on GPUs. calibration: None: that of an earlier run, if there was one."""
    model, parallel, trainer = config.model, config.parallel, config.trainer
    hardware = known_hardware(config.hardware, has_cuda)
    if calibration is None:
        calibration = load_calibration(config, hardware)
    says: list[str] = []
    rates = _rates(hardware, has_cuda, parallel.pipeline > 1, calibration, says)
    shape = layer_shape(config, has_cuda)
    cost = closed_form(
        shape,
        rates,
        value_keeps_qkv=not has_cuda,
        rest_bytes=2 * shape.residual() // shape.element_bytes if model.hidden_dropout else 0,
    )
    cost = with_seconds(cost, dict(calibration.pieces))
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    processes = config.plan.processes or int(os.environ.get("WORLD_SIZE", model_ranks))
    data_parallel = max(1, processes // model_ranks)
    a_round = trainer.micro_batch_size * data_parallel
    batch = trainer.global_batch_size or a_round
    chunks = layer_chunks(model.num_layers, parallel.pipeline, parallel.virtual_pipeline)
    vocab = model.padded_vocab_size(_vocab_size(config, says), parallel.tensor)
    stages = tuple(
        _stage(config, has_cuda, cost, rates, vocab, rank, chunks, batch // a_round, data_parallel, calibration)
        for rank in range(parallel.pipeline)
    )
    update_s = _update_s(config, stages, rates, data_parallel)
    if data_parallel > 1:
        hidden = parallel.overlap_grad_reduce
        says.append(
            f"gradients are reduced over {data_parallel * parallel.context} ranks "
            + ("behind backward" if hidden else f"at {_NETWORK_GBPS:g} GB/s a rank, hidden by nothing")
        )
    if parallel.tensor > 1:
        says.append(f"tensor-parallel ranks exchange at {_PEER_GBPS:g} GB/s each way")
    if parallel.pipeline > 1:
        says.append("sends between stages take no time; stages wait for the slowest of them")
    if has_cuda:
        says.append("peak: bytes that torch has allocated; context, NCCL and fragmentation come on top")
    per_token = flops_per_token(model, vocab, model.seq_length).total
    return Setting(
        pipeline=Pipeline(stages, model.num_layers, update_s),
        hardware=hardware,
        processes=processes,
        data_parallel=data_parallel,
        step_flops=float(per_token) * batch * model.seq_length,
        peak_flops=(hardware.peak_bf16_tflops or _CPU_TFLOPS) * 1e12,
        assumptions=tuple(says),
    )


def known_hardware(hardware: HardwareConfig, has_cuda: bool) -> HardwareConfig:
    """The hardware group's figures; where it says auto, those of this machine's first GPU as far as we know it.

    Without a GPU the device is the host, and its memory the device's.
    """
    if not has_cuda and hardware.memory_gib is None:
        return replace(hardware, memory_gib=psutil.virtual_memory().total / (1 << 30))
    if hardware.name != "auto" or not has_cuda:
        return hardware
    name = _gpu_name()
    for path in sorted((CONF / "hardware").glob("*.yaml")):
        entry = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        if name and entry.get("match") and re.search(entry["match"], name, re.IGNORECASE):
            # what was set by hand stays
            own = {key: value for key, value in vars(hardware).items() if value is not None and key != "name"}
            return replace(HardwareConfig(**entry), **own)
    return hardware


@cache
def _gpu_name() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip().splitlines()[0] if answer.stdout.strip() else ""


def _rates(hardware: HardwareConfig, has_cuda: bool, both_ways: bool, fit: Calibration, says: list[str]) -> Rates:
    peak = (hardware.peak_bf16_tflops or _CPU_TFLOPS) * 1e12
    copies = hardware.link_gbps or _CPU_GBPS
    link = fit.link_gbps or copies * (_LINK_BOTH_WAYS if both_ways else _LINK_ALONE)
    if has_cuda:
        says.append(
            f"{hardware.name}: of {peak / 1e12:g} TFLOP/s the layers reach {_LINEAR_SHARE:.0%}, single products "
            f"{_PRODUCT_SHARE:.0%}, attention {_ATTENTION_SHARE:.0%}; the link carries {link:.1f} GB/s each way"
        )
    if hardware.peak_bf16_tflops is None:
        says.append(f"no peak FLOP/s known: {_CPU_TFLOPS:g} TFLOP/s taken, so times are only good for comparing plans")
    if fit != Calibration():
        says.append(f"corrected by a run there: compute x {fit.compute:.3f}, {fit.extra_bytes / 2**30:+.2f} GiB")
    return Rates(
        linear_flops=_LINEAR_SHARE * peak / fit.compute,
        product_flops=_PRODUCT_SHARE * peak / fit.compute,
        attention_flops=_ATTENTION_SHARE * peak / fit.compute,
        device_bytes=(_BYTES_PER_FLOP * peak if has_cuda else _CPU_GBPS * 1e9) / fit.compute,
        link_bytes=link * 1e9,
        peer_bytes=_PEER_GBPS * 1e9,
        network_bytes=_NETWORK_GBPS * 1e9,
    )


def _vocab_size(config: Config, says: list[str]) -> int:
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    size = config.data.vocab_size or 256
    if config.data.tokenizer != "byte":
        says.append(f"the tokenizer's vocabulary is not read: {size} entries taken; set model.vocab_size")
    return size


def _stage(
    config: Config,
    has_cuda: bool,
    cost: LayerCost,
    rates: Rates,
    padded_vocab: int,
    rank: int,
    chunks: tuple[tuple[int, ...], ...],
    micro_batches: int,
    data_parallel: int,
    fit: Calibration,
) -> Stage:
    model, parallel, shape = config.model, config.parallel, cost.shape
    size, element = parallel.pipeline, shape.element_bytes
    first, last = rank == 0, rank == size - 1
    own = chunks[rank::size]
    norm = model.hidden_size * (1 if model.normalization is Normalization.rmsnorm else 2)
    table = padded_vocab // parallel.tensor * model.hidden_size
    embedding = (table if first else 0) + (
        model.seq_length * model.hidden_size if first and model.position is Position.learned else 0
    )
    output = table if last and not (model.tied_embeddings and first) else 0
    elements = sum(map(len, own)) * _layer_elements(config, cost) + embedding + output + (norm if last else 0)
    weight, gradient, state = bytes_per_element(config, element, data_parallel * parallel.context)
    return Stage(
        cost=cost,
        chunks=own,
        rank=rank,
        size=size,
        micro_batches=micro_batches,
        weight_bytes=elements * weight,
        gradient_bytes=elements * gradient,
        optimizer_bytes=int(elements * state),
        workspace_bytes=(_WORKSPACE_BYTES if has_cuda else 0) + fit.extra_bytes,
        link_bytes_per_s=rates.link_bytes,
        gradients_grow=config.optim.name is OptimizerName.none,
        head=_head(config, cost, rates, padded_vocab) if last else Head(),
        embedding_gradient_bytes=embedding * element,
        window_layers=1.0 if has_cuda else 0.0,
        host_limit_bytes=None if config.offload.host_limit_gib is None else int(config.offload.host_limit_gib * 2**30),
    )


def _layer_elements(config: Config, cost: LayerCost) -> int:
    model, split = config.model, config.parallel.tensor
    norms = 2 if model.normalization is Normalization.layernorm else 1
    elements = weight_elements(cost.shape)
    elements |= {"attn_norm": elements["attn_norm"] * norms, "mlp_norm": elements["mlp_norm"] * norms}
    qkv = (model.query_width + 2 * model.kv_width) // split if model.bias or model.qkv_bias else 0
    fc1 = model.ffn * (2 if model.gated else 1) // split
    return sum(elements.values()) + qkv + (fc1 + 2 * model.hidden_size if model.bias else 0)


def bytes_per_element(config: Config, element_bytes: int, sharded_over: int) -> tuple[int, int, float]:
    """(weight, gradient buffer, optimizer state) bytes for each parameter of a rank.

    Megatron's optimizers: in bf16 an fp32 copy and Adam's two moments; the distributed one shares these out.
    """
    if config.optim.name is OptimizerName.none:
        return element_bytes, 0, 0.0
    moments = 2 if config.optim.name is OptimizerName.adam else int(config.optim.sgd_momentum > 0)
    state = 4.0 * moments + (4.0 if element_bytes < 4 else 0.0)
    gradient = 4 if config.parallel.grad_reduce_in_fp32 else element_bytes
    return element_bytes, gradient, state / sharded_over if config.parallel.distributed_optimizer else state


def _head(config: Config, cost: LayerCost, rates: Rates, padded_vocab: int) -> Head:
    model, parallel, shape = config.model, config.parallel, cost.shape
    held = loss_head_bytes(config, shape, padded_vocab)
    rows = padded_vocab // parallel.tensor
    product_s = 2.0 * shape.tokens * model.hidden_size * rows / rates.product_flops
    softmax_s = _HEAD_PASSES * 4.0 * shape.tokens * rows / rates.device_bytes
    again = product_s if loss_head(config) is LossHead.chunked else 0.0
    return Head(
        # the last layer's output waits for the final norm's backward
        kept_bytes=held.kept + shape.residual(),
        transient_bytes=held.transient,
        gradient_bytes=rows * model.hidden_size * shape.element_bytes,
        forward_s=product_s + softmax_s,
        backward_s=2 * product_s + softmax_s + again,
    )


def _update_s(config: Config, stages: tuple[Stage, ...], rates: Rates, data_parallel: int) -> float:
    """Optimizer, and the reductions that it waits for."""
    if config.optim.name is OptimizerName.none:
        return 0.0
    ranks = data_parallel * config.parallel.context
    worst = max(stages, key=lambda stage: stage.gradient_bytes)
    shared = ranks if config.parallel.distributed_optimizer else 1
    seconds = worst.weight_bytes / stages[0].cost.shape.element_bytes / shared * _UPDATE_BYTES / rates.device_bytes
    if ranks > 1 and not config.parallel.overlap_grad_reduce:
        seconds += 2 * (ranks - 1) / ranks * worst.gradient_bytes / rates.network_bytes
    return seconds
