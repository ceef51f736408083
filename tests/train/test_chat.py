"""Does a run on conversations learn what the assistant says, and nothing else?"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headrace.errors import TrainInputError
from headrace.train.byte_tokenizer import byte_tokenizer
from headrace.train.chat import IGNORED, Conversations
from headrace.train.config import TrainConfig
from headrace.train.progress import Progress
from headrace.train.trainer import train

PLAIN = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<assistant>' }}{% generation %}{{ m.content + '\n' }}"
    "{% endgeneration %}{% else %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endif %}{% endfor %}"
)
# Only the last turn is shown in full, as by templates that drop earlier thoughts.
FORGETFUL = (
    "{% for m in messages %}{{ '<' + m.role + '>' + (m.content if loop.last else m.content[:1]) + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
STRICT = "{{ raise_exception('roles must alternate') }}"

TURNS = [("system", "be kind"), ("user", "h\u00e9?"), ("assistant", "\u00e7a va"), ("user", "and"), ("assistant", "so")]
MESSAGES = {"messages": [{"role": role, "content": content, "name": None} for role, content in TURNS]}
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = {"conversations": [{"from": NAMES[role], "value": content} for role, content in TURNS]}


def conversations(template: str) -> Conversations:
    tokenizer = byte_tokenizer(longest=64)
    tokenizer.chat_template = template
    return Conversations(tokenizer)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["rendered", "marked"])
@pytest.mark.parametrize("example", [MESSAGES, SHAREGPT], ids=["messages", "sharegpt"])
def test_the_assistants_turns_are_learned(template: str, example: dict[str, Any]):
    encoded = conversations(template).encode(example, "here")
    whole = "".join(f"<{role}>{content}\n" for role, content in TURNS)
    assert bytes(encoded["input_ids"]).decode() == whole
    assert bytes(label for label in encoded["labels"] if label != IGNORED).decode() == "\u00e7a va\nso\n"
    assert all(label in (IGNORED, token) for token, label in zip(*encoded.values(), strict=True))


@pytest.mark.parametrize(
    ("template", "example", "says"),
    [
        (FORGETFUL, MESSAGES, "here: the chat template cannot be cut into turns: turn 3 .*generation"),
        (STRICT, MESSAGES, "here: the chat template refuses the conversation: roles must alternate"),
        (PLAIN, {"messages": [{"role": "user", "content": "x"}]}, "the assistant says nothing"),
        (PLAIN, {"messages": [{"content": "x"}]}, "a turn has 'content', and no \"role\""),
        (PLAIN, {"messages": "x"}, "is to be a list of turns"),
        (PLAIN, {"conversations": [{"from": "cat", "value": "x"}]}, "\"from\" is 'cat'; give one of human, user, gpt"),
        (MARKED.replace("'assistant' %", "'robot' %"), MESSAGES, "marks no token as the assistant's"),
    ],
)
def test_a_conversation_that_cannot_be_learned_is_named(template: str, example: dict[str, Any], says: str):
    with pytest.raises(TrainInputError, match=says):
        conversations(template).encode(example, "here")


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(TrainInputError, match="the tokenizer has no chat template"):
        Conversations(byte_tokenizer(longest=64))


@pytest.mark.parametrize("model_directory", ["llama"], indirect=True)
@pytest.mark.parametrize("packing", [None, True])
def test_a_run_on_conversations_equals_the_plain_run(
    settings: Callable[..., TrainConfig],
    progress: Progress,
    model_directory: Path,
    tmp_path: Path,
    packing: bool | None,
):
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(model_directory)
    long = {"messages": [{"role": "user", "content": "x" * 50}, {"role": "assistant", "content": "y"}]}
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps(example) for example in [MESSAGES, SHAREGPT, long] * 4))
    config = settings(
        text=(path,),
        model=model_directory,
        device_memory="75%",
        compare_plain=3,
        accumulate=2,
        packing=packing,
        sequence_length=64,
    )
    result = train(config, progress)
    assert result.losses == result.plain_losses
    left_out = [
        note for note in progress.notes if note.startswith("4 conversations without the assistant in the first 64")
    ]
    assert len(left_out) == (packing is None)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == PLAIN
