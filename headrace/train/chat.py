"""Which tokens of a conversation does the model learn to say? Those of the assistant's turns, by the chat template."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from headrace.errors import TrainInputError
from headrace.train.files import CHAT_KEYS

IGNORED = -100  # the label of a token that is not learned

_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
_SPEAKERS |= {"bard": "assistant", "assistant": "assistant", "model": "assistant", "system": "system"}
_SPEAKERS |= {"tool": "tool", "function": "tool", "observation": "tool"}
_GENERATION = re.compile(r"\{%-?\s*generation\b")


class Conversations:
    """Encodes conversations with the tokenizer's chat template. Raises TrainInputError if the tokenizer has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise TrainInputError(
                "the tokenizer has no chat template, which says how conversations become text; name a --model whose"
                " tokenizer has one, or train on text"
            ) from error
        self._tokenizer = tokenizer
        self._marked = _GENERATION.search(template) is not None

    def encode(self, example: Mapping[str, Any], where: str) -> dict[str, list[int]]:
        """Token ids and labels of one conversation. `where` says in errors which one it is."""
        messages = _messages(example, where)
        if not any(message["role"] == "assistant" for message in messages):
            raise TrainInputError(f"{where}: the assistant says nothing, so nothing can be learned; leave it out")
        learned = self._by_mask if self._marked else self._by_rendering
        try:
            ids, mask = learned(messages, where)
        except TemplateError as error:  # templates refuse unknown roles, and roles in another order
            raise TrainInputError(f"{where}: the chat template refuses the conversation: {error}") from error
        labels = [token if own else IGNORED for token, own in zip(ids, mask, strict=True)]
        return {"input_ids": ids, "labels": labels}

    def _by_mask(self, messages: list[dict[str, Any]], where: str) -> tuple[list[int], list[int]]:
        encoded = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = encoded["input_ids"], encoded["assistant_masks"]
        if not any(mask):
            raise TrainInputError(f"{where}: the chat template marks no token as the assistant's")
        return ids, mask

    def _by_rendering(self, messages: list[dict[str, Any]], where: str) -> tuple[list[int], list[int]]:
        """Token ids and labels, where an assistant's turn is the text that it adds to the rendered turns before it."""
        whole = self._render(messages)
        turns = []  # the range of characters of each
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._render(messages[:index], prompt=True), self._render(messages[: index + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise TrainInputError(
                    f"{where}: the chat template cannot be cut into turns: turn {index + 1} is rendered in another"
                    " way when others follow it, or does not begin with its prompt; mark what the assistant says in the"
                    " template"
                    " with {% generation %}"
                )
            turns.append((len(before), len(after)))
        if not self._tokenizer.is_fast:
            raise TrainInputError(
                f"the tokenizer {type(self._tokenizer).__name__} does not tell where a token lies in the text; mark"
                " what the assistant says in its chat template with {% generation %}"
            )
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        mask = [int(any(start <= first < end for start, end in turns)) for first, last in encoded["offset_mapping"]]
        return encoded["input_ids"], mask

    def _render(self, messages: Sequence[dict[str, Any]], *, prompt: bool = False) -> str:
        if not messages:
            return ""  # many templates need at least one turn
        rendered = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        return str(rendered)


def _messages(example: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The turns of {"messages": [{"role", "content"}]}, or of ShareGPT's {"conversations": [{"from", "value"}]}."""
    turns = next((example[key] for key in CHAT_KEYS if example.get(key)), None)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise TrainInputError(f'{where}: "messages" or "conversations" is to be a list of turns')
    return [_message(turn, where) for turn in turns]


def _message(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = {key: value for key, value in turn.items() if value is not None}  # None: only other turns have it
    if "from" in given:
        speaker = given.get("from")
        known = ", ".join(_SPEAKERS)
        if speaker not in _SPEAKERS:
            raise TrainInputError(f'{where}: "from" is {speaker!r}; give one of {known}')
        return {"role": _SPEAKERS[speaker], "content": given.get("value", "")}
    if not isinstance(given.get("role"), str):
        keys = ", ".join(map(repr, given)) or "nothing"
        raise TrainInputError(f'{where}: a turn has {keys}, and no "role"')
    return given
