"""One rank of two, on the CPU: `python parallel_worker.py RANK STORE` prints what test_parallel.py checks, as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from models import cpu

cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from models import loss_head  # noqa: E402
from models.builder import build_gpt, transformer_config  # noqa: E402
from models.config import Layout, LossHead, ModelConfig  # noqa: E402

MODEL = ModelConfig(num_layers=4, hidden_size=64, num_query_groups=2, seq_length=16)
#: three chunks of tokens and, over two ranks, three of the vocabulary
HEAD_MODEL = replace(MODEL, num_layers=2, seq_length=150, make_vocab_size_divisible_by=100)


def build(layout: Layout, model: ModelConfig = MODEL, vocab_size: int = 256) -> list[Any]:
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline, layout.virtual_pipeline)
    model_parallel_cuda_manual_seed(1)
    return build_gpt(model, transformer_config(model, layout), vocab_size=vocab_size)


def tensor_parallel(sequence_parallel: bool) -> dict[str, Any]:
    """Loss and the gradients of all norms, summed over ranks where sequence parallelism calls for it."""
    (gpt,) = build(Layout(tensor=2, sequence_parallel=sequence_parallel))
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(7))
    positions = torch.arange(16).expand(2, -1)
    loss = gpt(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
    loss.backward()
    gradients = {}
    for name, parameter in gpt.named_parameters():
        if "layernorm" in name:
            if getattr(parameter, "sequence_parallel", False):
                torch.distributed.all_reduce(parameter.grad)
            gradients[name] = parameter.grad.tolist()
    parallel_state.destroy_model_parallel()
    return {"loss": loss.item(), "norms": gradients}


def shares(chunk: Any) -> bool:
    return bool(chunk.pre_process or chunk.post_process)


def interleaved() -> list[dict[str, Any]]:
    """What each of this stage's two chunks holds, of a model with tied embeddings."""
    tied = replace(MODEL, tied_embeddings=True)
    chunks = build(Layout(pipeline=2, virtual_pipeline=2, overlap_p2p_comm=True), tied)
    parallel_state.destroy_model_parallel()
    return [
        {
            "embedding": chunk.pre_process,
            "output": chunk.post_process,
            "layers": [layer.layer_number for layer in chunk.decoder.layers],
            "tied": chunk.shared_embedding_or_output_weight().sum().item() if shares(chunk) else None,
            "final_norm": chunk.decoder.final_layernorm is not None,
        }
        for chunk in chunks
    ]


def our_head(layout: Layout, tied: bool, ours: LossHead = LossHead.chunked) -> dict[str, Any]:
    """Largest relative difference from the full head, of the losses and of any gradient."""
    loss_head.CHUNK_BYTES = 1
    found = []
    for head in (LossHead.full, ours):
        model = replace(HEAD_MODEL, tied_embeddings=tied, loss_head=head)
        torch.manual_seed(1)
        (gpt,) = build(layout, model, vocab_size=600)
        if not gpt.pre_process:
            gpt.set_input_tensor(torch.rand(150, 2, 64, generator=torch.Generator().manual_seed(5)))
        tokens = torch.randint(0, 600, (2, 151), generator=torch.Generator().manual_seed(7))
        output = gpt(tokens[:, :-1], torch.arange(150).expand(2, -1), None, labels=tokens[:, 1:])
        (output * torch.rand(output.shape, generator=torch.Generator().manual_seed(3))).mean().backward()
        found.append((output.detach(), {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}))
        kind = type(gpt.output_layer).__name__ if gpt.post_process else None
        parallel_state.destroy_model_parallel()
    (losses, gradients), (our_losses, our_gradients) = found
    assert gradients.keys() == our_gradients.keys()
    return {
        "head": kind,
        "losses": ((our_losses - losses) / losses).abs().max().item(),
        "gradients": max(
            ((our_gradients[name] - gradient).norm() / gradient.norm()).item() for name, gradient in gradients.items()
        ),
        "names": sorted(gradients),
    }


if __name__ == "__main__":
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2
    )
    found = {
        "plain": tensor_parallel(False),
        "sequence": tensor_parallel(True),
        "chunks": interleaved(),
        "head_tensor": our_head(Layout(tensor=2), tied=False),
        "head_tensor_tied": our_head(Layout(tensor=2), tied=True),
        "head_sequence": our_head(Layout(tensor=2, sequence_parallel=True), tied=False),
        "head_in_place": our_head(Layout(tensor=2, sequence_parallel=True), False, LossHead.in_place),
        "head_pipeline": our_head(Layout(pipeline=2), tied=False),
        "head_pipeline_tied": our_head(Layout(pipeline=2), tied=True),
    }
    print(json.dumps(found))
