"""Write a tiny BERT with random weights and a small data set: `python prepare.py DIRECTORY`. Nothing is downloaded.

DIRECTORY/model is for `--model`, and DIRECTORY/data for `--data-dir` or the channel `training`.
"""

import itertools
import json
import sys
from pathlib import Path

from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

GOOD, BAD = ("good", "great", "fine", "lovely"), ("bad", "poor", "dull", "awful")
THINGS, PLACES = ("film", "song", "meal", "book", "play"), ("here", "there", "again", "today")


def main(directory: Path) -> None:
    sentences = [
        {"text": f"a {word} {thing} {place}", "label": int(word in GOOD)}
        for word, thing, place in itertools.product(GOOD + BAD, THINGS, PLACES)
    ]
    data, model = directory / "data", directory / "model"
    for path in (data, model):
        path.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", sentences[::2] + sentences[1::4]), ("test", sentences[3::4])):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", *GOOD, *BAD, *THINGS, *PLACES)
    (model / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(model)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
