"""What does `headrace train` do? The reference trainer; `headrace.train.trainer.train` is its entrance.

| question | file |
|---|---|
| what a run can be told, and what is refused before anything is read | `config.py` |
| which files are read, as what | `files.py`; conversations: `chat.py` |
| tokens, sequences, batches and their order | `data.py` |
| which model, which adapters | `model.py`; the built-in one's tokens: `byte_tokenizer.py` |
| where its weights live | `placement.py` |
| what updates it, at which rate | `optimizer.py` |
| one step; the whole run | `run.py`; `trainer.py` |
| on which ranks, and what each of them does | `ranks.py` |
| how good the model is | `evaluation.py` |
| how a run ends early, and goes on | `stop.py`; `resume.py` |
| what is said when memory runs out | `out_of_memory.py` |
| what is told on the way | `progress.py` |
"""
