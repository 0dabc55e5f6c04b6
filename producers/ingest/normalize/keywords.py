"""Words that end all messages to a person, in the three languages of the product, for every chat sender.

A message stops only if it is such a word and nothing else: "quero cancelar meu pedido" is a question. Case, accents,
punctuation and spaces around do not count.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Literal, NamedTuple

Keyword = Literal["STOP", "SAIR"]
STOPPING_KINDS = frozenset({"text", "button"})
"""What a person wrote, or the button of a template it pressed. "Sair" in a menu of the bot's only leaves the menu."""

_WORDS: Mapping[Keyword, tuple[str, ...]] = {
    "SAIR": (
        "SAIR", "PARAR", "PARE", "CANCELAR", "CANCELAR INSCRICAO", "DESCADASTRAR", "DESCADASTRE", "DESINSCREVER",
        "REMOVER", "NAO QUERO MAIS", "NAO QUERO MAIS RECEBER", "NAO ENVIAR MAIS",
    ),
    "STOP": (
        "STOP", "STOP ALL", "STOPALL", "UNSUBSCRIBE", "CANCEL", "OPT OUT", "OPTOUT", "QUIT",
        "BAJA", "DAR DE BAJA", "DARME DE BAJA", "DARSE DE BAJA", "SALIR", "DETENER", "DESUSCRIBIR", "DESUSCRIBIRME",
        "CANCELAR SUSCRIPCION",
    ),
}  # fmt: skip
_KEYWORD_OF = {word: keyword for keyword, words in _WORDS.items() for word in words}
_LONGEST = max(map(len, _KEYWORD_OF))
_NO_LETTER = re.compile(r"[^A-Z0-9]+")


class StopWord(NamedTuple):
    """`keyword` is the one of the event catalogue that it counts as, `word` what was written, in plain capitals."""

    keyword: Keyword
    word: str


def stop_word(text: str | None) -> StopWord | None:
    """The stop word that this whole text is, or None."""
    if not text or len(text) > 4 * _LONGEST:
        return None
    decomposed = unicodedata.normalize("NFKD", text)
    plain = "".join(letter for letter in decomposed if not unicodedata.combining(letter)).upper()
    word = _NO_LETTER.sub(" ", plain).strip()
    keyword = _KEYWORD_OF.get(word)
    return None if keyword is None else StopWord(keyword, word)
