"""A tokenizer of bytes, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle.testing.text import TokenizerSuite

SOURCE = """
import codecs

from treadle.api import impl

TREADLE = {"tokenizers": ["mine"]}
BEGIN, END = 256, 257
MARKS = {"<begin>": BEGIN, "<end>": END}
TEXTS = {BEGIN: "<begin>", END: "<end>"}


class Detokenizer:
    def __init__(self, skip):
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.skip = skip

    def decode_next(self, token):
        if token >= BEGIN:
            return "" if self.skip else self.flush() + TEXTS[token]
        return self.decoder.decode(bytes([token]))

    def decode_many(self, tokens):
        return "".join(map(self.decode_next, tokens))

    def flush(self):
        return self.decoder.decode(b"", True)


class Mine:
    vocab_size = 258
    eos_token_id = END
    special_token_ids = frozenset(TEXTS)
    chat_template = None

    def encode(self, text, *, add_special_tokens=True):
        ids = [BEGIN] if add_special_tokens else []
        while text:
            mark = next((m for m in MARKS if text.startswith(m)), None)
            ids += [MARKS[mark]] if mark else text[0].encode()
            text = text[len(mark or " "):]
        return ids

    def decode(self, ids, *, skip_special_tokens=True):
        whole = Detokenizer(skip_special_tokens)
        return "".join(map(whole.decode_next, ids)) + whole.flush()

    def id_to_token(self, token):
        return TEXTS.get(token) or bytes([token]).decode(errors="replace")

    def token_bytes(self, token):
        return b"" if token >= BEGIN else bytes([token])

    def create_detokenizer(self, prompt_ids=(), *, skip_special_tokens=True, **spaces):
        stream = Detokenizer(skip_special_tokens)
        for token in prompt_ids[-3:]:
            stream.decode_next(token)
        return stream


@impl
def treadle_tokenizer(mode, files):
    return Mine() if mode == "mine" else None
"""


def streaming(condition: str, character: str) -> dict[str, str]:
    """The edits of a stream that loses a character."""
    return {
        "        return stream\n": f"        if {condition}:\n"
        "            decode_next = stream.decode_next\n"
        f"            stream.decode_next = lambda token: decode_next(token).replace({character!r}, '')\n"
        "        return stream\n"
    }


SPECIMENS = (
    Specimen(
        suite=TokenizerSuite,
        plugin="tokenizers:mine",
        source=SOURCE,
        mutants=(
            Mutant(
                "test_texts_survive",
                {"decode(bytes([token]))": 'decode(bytes([token])).replace("\\t", " ")'},
            ),
            Mutant(
                "test_ids_are_below_the_size_of_the_vocabulary",
                {"vocab_size = 258": "vocab_size = 257"},
            ),
            Mutant(
                "test_every_id_has_bytes_and_a_text", {'b"" if token >= BEGIN else bytes': "bytes"}
            ),
            Mutant(
                "test_special_tokens_are_added_only_when_asked",
                {"[BEGIN] if add_special_tokens else []": "[BEGIN]"},
            ),
            Mutant(
                "test_special_tokens_are_added_only_when_asked",
                {"[BEGIN] if": "[BEGIN, 32] if"},
            ),
            Mutant("test_a_marker_becomes_its_token", {"mark = next(": "mark = 0 and next("}),
            Mutant("test_a_stream_says_what_decoding_says", streaming("not prompt_ids", "\t")),
            Mutant(
                "test_many_tokens_are_decoded_like_each",
                {"self.decode_next, tokens": "self.decode_next, tokens[:2]"},
            ),
            Mutant("test_a_stream_goes_on_after_a_prompt", streaming("prompt_ids", " ")),
            Mutant("test_a_stream_completes_what_the_prompt_left_open", {"prompt_ids[-3:]": "()"}),
            Mutant(
                "test_two_streams_share_nothing",
                {
                    "self.decoder = codecs": 'Detokenizer.decoder = vars(Detokenizer).get("decoder") or codecs'
                },
            ),
            Mutant(
                "test_an_unfinished_character_becomes_a_mark_at_the_end",
                {'return self.decoder.decode(b"", True)': 'return self.decoder.decode(b"") or ""'},
            ),
            Mutant("test_special_tokens_can_be_left_out", {"self.skip = skip": "self.skip = True"}),
            Mutant(
                "test_a_stream_leaves_out_what_decoding_leaves_out",
                {"stream = Detokenizer(skip_special_tokens)": "stream = Detokenizer(True)"},
            ),
            Mutant(
                "test_bytes_of_tokens_add_up_to_the_text",
                {"else bytes([token])\n": "else self.id_to_token(token).encode()\n"},
            ),
            Mutant(
                "test_threads_may_share_it",
                {
                    "import codecs": "import codecs\nimport threading",
                    "        while text": "        if threading.current_thread().name[:4] != 'Main':\n"
                    "            raise RuntimeError('another thread made this object')\n"
                    "        while text",
                },
            ),
        ),
    ),
)
