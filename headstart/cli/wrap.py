"""Text that still comes, broken between words to fit a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

FENCE = "```"
TAB = 8


class Wrap:
    """Breaks lines at spaces before they are longer than `width` says. Blocks of code, between lines that begin with
    FENCE, stay as they are, and so do words that are longer. A word is kept back until it is known to be whole."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._spaces = self._word = self._line = ""  # of `_line`, what tells a fence
        self._is_code = self._after_wide = False

    def push(self, text: str) -> str:
        """What can be shown now."""
        return "".join(map(self._take, text))

    def finish(self) -> str:
        """The rest."""
        return self._shown()

    def _take(self, letter: str) -> str:
        if letter == "\n":
            shown = self._shown() + letter
            self._is_code ^= self._line == FENCE
            self._column, self._spaces, self._line = 0, "", ""
            return shown
        if len(self._line) < len(FENCE):
            self._line = (self._line + letter).lstrip()
        if letter in " \t":
            shown = self._shown()
            self._spaces += letter
            return shown
        if _cells(letter) < 2:
            self._word += letter
            return self._shown() if _cells(self._word) >= self._width() else ""
        shown = self._shown()  # Chinese and Japanese have no spaces: lines end anywhere
        self._word = letter
        return shown + self._shown()

    def _shown(self) -> str:
        """The word that was kept back, where it belongs."""
        spaces, word = self._spaces, self._word
        if not word:
            return ""
        self._spaces = self._word = ""
        column, width = self._column, self._width()
        for each in spaces:
            column = column + 1 if each == " " else (column // TAB + 1) * TAB
        column += _cells(word)
        may_end = spaces or self._after_wide or _cells(word[0]) == 2
        if column > width and self._column and may_end and not self._is_code and self._line != FENCE:
            spaces, column = "\n", _cells(word)
        self._column = column and (column - 1) % width + 1  # what is too long is broken by the terminal
        self._after_wide = _cells(word[-1]) == 2
        return spaces + word


def _cells(text: str) -> int:
    """Columns of a terminal that a text takes."""
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)
