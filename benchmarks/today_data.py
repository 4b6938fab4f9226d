"""Writes tiny data sets and models for public training scripts: `python today_data.py DIRECTORY`.

Runs in an image with transformers. All values come from one seed, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

_WORDS = [
    "the",
    "small",
    "fish",
    "swims",
    "past",
    "a",
    "red",
    "stone",
    "and",
    "two",
    "old",
    "boats",
    "turn",
    "round",
    "in",
    "clear",
    "cold",
    "water",
    "while",
    "birds",
    "sing",
]
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def sentences(count: int, seed: int = 0) -> list[str]:
    """Return sentences of 6 to 12 words."""
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(_WORDS, k=chooser.randint(6, 12))) for _ in range(count)]


def write_digits(place: Path, train: int = 640, test: int = 128) -> None:
    """Write MNIST's four files, with a bright square at a place that shows the class."""
    raw = place / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        images = generator.integers(0, 64, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 4)
            image[4 + 7 * row : 10 + 7 * row, 1 + 7 * column : 7 + 7 * column] = 255
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, count, 28, 28) + images.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, count) + labels.tobytes())


def write_lightning_digits(place: Path) -> None:
    """Write the digits as Lightning's demo data module reads them, in MNIST's full size, which its scripts split."""
    import torch

    complete = place / "MNIST" / "complete"
    complete.mkdir(parents=True)
    torch.manual_seed(0)
    for name, count in (("training.pt", 60000), ("test.pt", 512)):
        images = torch.randint(0, 255, (count, 28, 28), dtype=torch.uint8)
        torch.save((images, torch.randint(0, 10, (count,))), complete / name)


def write_images(place: Path) -> None:
    """Write pictures of two classes in train/ and val/, and captions.csv with their captions."""
    from PIL import Image  # type: ignore[import-not-found]

    generator = np.random.default_rng(0)
    rows = ["filepath\ttitle"]
    for part, count in (("train", 32), ("val", 8)):
        for number, name in enumerate(("bright", "dark")):
            directory = place / part / name
            directory.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 128, (64, 64, 3), dtype=np.uint8) + np.uint8(100 * (1 - number))
                Image.fromarray(pixels).save(directory / f"{index}.png")
                rows.append(f"/data/images/{part}/{name}/{index}.png\ta {name} picture {_WORDS[index % 20]}")
    (place / "captions.csv").write_text("\n".join(rows[:65]) + "\n")


def write_text(place: Path) -> None:
    """Write text for language models: files of lines, nanoGPT's binary files and one JSON file of sentences."""
    place.mkdir(parents=True)
    lines = sentences(4000)
    for name, part in (("train", lines[:3000]), ("valid", lines[3000:3500]), ("test", lines[3500:])):
        (place / f"{name}.txt").write_text("\n".join(part) + "\n")
    text = "\n".join(lines)
    (place / "input.txt").write_text(f"{text}\nO God, O God!\n")  # minGPT continues these words
    letters = sorted(set(text))
    codes = np.array([letters.index(letter) for letter in text], dtype=np.uint16)
    codes[:90000].tofile(place / "train.bin")
    codes[90000:].tofile(place / "val.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}
    (place / "meta.pkl").write_bytes(pickle.dumps(meta))
    rows = [{"instruction": line, "input": "", "output": line[::-1]} for line in lines[:64]]
    (place / "alpaca.json").write_text(json.dumps(rows))


def write_chats(place: Path) -> None:
    """Write data sets of conversations, preferences and prompts, as TRL's trainers read them."""
    lines = sentences(400, seed=1)

    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    def assistant(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    kinds: dict[str, Callable[[str, str], dict[str, object]]] = {
        "messages": lambda a, b: {"messages": [user(a), assistant(b)]},
        "preferences": lambda a, b: {"prompt": [user(a)], "chosen": [assistant(b)], "rejected": [assistant(b[::-1])]},
        "pairs": lambda a, b: {"chosen": [user(a), assistant(b)], "rejected": [user(a), assistant(b[::-1])]},
        "prompts": lambda a, b: {"prompt": [user(a)], "solution": b},
    }
    for kind, row in kinds.items():
        directory = place / kind
        directory.mkdir(parents=True)
        for name, start, count in (("train", 0, 64), ("test", 128, 16)):
            pairs = zip(lines[start : start + count], lines[start + 200 : start + 200 + count], strict=True)
            text = "".join(json.dumps(row(a, b)) + "\n" for a, b in pairs)
            (directory / f"{name}.jsonl").write_text(text)


def write_nli(place: Path) -> None:
    """Write the data sets that scripts of sentence-transformers load by name: all-nli and stsb."""
    lines = sentences(12000, seed=2)
    nli, sts = place / "all-nli", place / "stsb"
    for directory in (nli / "pair-class", sts):
        directory.mkdir(parents=True)
    for name, count in (("train", 10000), ("dev", 1000)):
        rows = [{"premise": lines[i], "hypothesis": lines[-i], "label": i % 3} for i in range(count)]
        (nli / "pair-class" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = "---\nconfigs:\n- config_name: pair-class\n  data_files:\n"
    files = "".join(f"  - split: {n}\n    path: pair-class/{n}.jsonl\n" for n in ("train", "dev"))
    (nli / "README.md").write_text(f"{config}{files}---\n")
    for name in ("train", "validation", "test"):
        rows = [{"sentence1": lines[i], "sentence2": lines[i + 9], "score": i % 6 / 5} for i in range(32)]
        (sts / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_stories(place: Path) -> None:
    """Write stories as a data set with the column `text`, in Parquet files with row groups."""
    import pyarrow as pa  # type: ignore[import-not-found]
    import pyarrow.parquet as pq  # type: ignore[import-not-found]

    place.mkdir(parents=True)
    lines = sentences(20000, seed=3)
    stories = [". ".join(lines[i : i + 5]) + "." for i in range(0, len(lines), 5)]
    for index in range(2):
        table = pa.table({"text": stories[index * 2000 : (index + 1) * 2000]})
        pq.write_table(table, place / f"shard_{index:05d}.parquet", row_group_size=200)


def write_crawl(place: Path) -> None:
    """Write a data set of texts as torchtitan reads its test data."""
    place.mkdir(parents=True)
    lines = sentences(4000, seed=4)
    rows = [{"text": ". ".join(lines[i : i + 8])} for i in range(0, len(lines), 8)]
    (place / "data.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_models(place: Path) -> None:
    """Write a tokenizer, a Llama of two layers and a BERT of two layers, with random weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<pad>", "[CLS]", "[SEP]", "[MASK]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(sentences(2000), trainer)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    masks = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names, **masks)
    fast.chat_template = _TEMPLATE
    torch.manual_seed(0)
    size = {"vocab_size": len(fast), "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    llama = LlamaConfig(intermediate_size=128, num_key_value_heads=4, max_position_embeddings=256, **size, **ids)
    bert = BertConfig(intermediate_size=128, max_position_embeddings=256, **size, pad_token_id=3)
    for name, model in (("llama", LlamaForCausalLM(llama)), ("bert", BertModel(bert))):
        model.save_pretrained(place / name)
        fast.save_pretrained(place / name)
    write_configurations(place)


def write_configurations(place: Path) -> None:
    """Write configurations of models that their scripts create: open_clip's CLIP and the U-Net of diffusers."""
    tower = {"layers": 2, "width": 64}
    text = {"context_length": 77, "vocab_size": 49408, "heads": 2, **tower}
    vision = {"image_size": 64, "patch_size": 16, "head_width": 32, **tower}
    clip = {"model_cfg": {"embed_dim": 64, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": {}}
    blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
    unet = {"_class_name": "UNet2DModel", "sample_size": 32, "block_out_channels": [32, 32], **blocks}
    for name, file, content in (("clip", "open_clip_config.json", clip), ("unet", "config.json", unet)):
        (place / name).mkdir()
        (place / name / file).write_text(json.dumps(content))


_WRITERS: dict[str, Callable[[Path], None]] = {
    "mnist": write_digits,
    "lightning": write_lightning_digits,
    "images": write_images,
    "text": write_text,
    "chats": write_chats,
    "sentence-transformers": write_nli,
    "stories": write_stories,
    "c4": write_crawl,
    "models": write_models,
}


def main() -> None:
    """Write each set that is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    for name, write in _WRITERS.items():
        place = parser.parse_args().directory / name
        if not place.exists():
            write(place)
            print(f"wrote {place}", flush=True)


if __name__ == "__main__":
    main()
