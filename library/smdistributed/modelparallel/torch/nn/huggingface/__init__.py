"""Hugging Face's models and tensor parallelism, which is not implemented: names in state dicts (AWS API 1.7)."""

from smdistributed.modelparallel.torch.nn.huggingface import bert, gpt2, gptj, gptneo, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
