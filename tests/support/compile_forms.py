"""Compiles forms of answers as a replica does, each in a thread with a small stack: ``python -m ... < forms.json``.

Reads a JSON list of ``[kind, form]`` and says of each, in a line, what became of it. Nothing but the end of the process
keeps a line from coming.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from omni_discovery.inputs.form_width import MAX_ROW, MAX_STEP

#: A quarter of what threads usually have.
STACK_BYTES = 2 << 20


def grammar_of(kind: str, form: Any) -> str:
    """The grammar that vLLM makes of a form."""
    match kind:
        case "json":
            return str(LLMatcher.grammar_from_json_schema(form, defaults={"whitespace_flexible": True}))
        case "structural_tag":
            tags = [
                StructTag(
                    trigger=next(each for each in form["triggers"] if tag["begin"].startswith(each)),
                    begin=tag["begin"],
                    grammar=LLMatcher.grammar_from_json_schema(tag["schema"]),
                    end=tag["end"],
                )
                for tag in form["structures"]
            ]
            return StructTag.to_grammar(tags)
        case "grammar" | "regex":
            return llguidance.grammar_from(kind, form)
    raise ValueError(kind)


def compile_form(kind: str, form: Any) -> str:
    """Compile a form and take its first few tokens; what became of that."""
    try:
        grammar = grammar_of(kind, form)
        refusal = LLMatcher.validate_grammar(grammar, None)
        if refusal:
            return "refused"
        tokenizer = LLTokenizer("byte")
        limits = LLParserLimits(max_items_in_row=MAX_ROW, step_max_items=MAX_STEP)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        mask = allocate_token_bitmask(1, tokenizer.vocab_size)
        for _ in range(8):
            fill_next_token_bitmask(matcher, mask, 0)
            ids = np.nonzero(np.unpackbits(mask[0].view("uint8"), bitorder="little"))[0]
            if matcher.is_stopped() or matcher.is_error() or not len(ids):
                break
            matcher.consume_token(int(ids[len(ids) // 2]))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no end of the process
        return f"refused {type(error).__name__}"
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        return f"panic {error}".splitlines()[0]
    return "made"


def main() -> None:
    """See the module."""
    for kind, form in json.load(sys.stdin):
        said: list[str] = []
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=lambda k=kind, f=form, s=said: s.append(compile_form(k, f)))
        thread.start()
        thread.join()
        sys.stdout.write(f"{said[0]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
