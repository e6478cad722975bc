"""What Apple's compiler refuses and clang takes as C++: found in the text, and by clang with real address spaces."""

from __future__ import annotations

import re
import subprocess

from .compiler import FLAGS, clang, translate
from .signature import Signature

#: Compiled, never run: pointers of different address spaces do not convert, and no rounding goes unsaid.
FLAGS_OF_LINT = [
    *("-fsyntax-only", "-DSIM_ADDRESS_SPACES", "-Wall", "-Wextra", "-Wimplicit-float-conversion", "-Werror"),
    *("-Wno-unused-parameter", "-Wno-unused-but-set-variable", "-Wno-missing-field-initializers"),
]

_SPACES = "constant|device|threadgroup|thread"
#: MSL's types, template parameters (a capital) and classes (CamelCase).
_TYPE = (
    r"(?:float|half|bfloat|bool|u?char|u?short|u?int|u?long|float16_t|bfloat16_t|u?int\d+_t|vec<[^<>]*>)\d?"
    r"|[A-Z](?:[a-z]\w*)?"
)
#: A pointer or reference in a declaration or a cast: the words before its type must name an address space.
_POINTER = re.compile(
    rf"((?:\b(?:const|volatile|{_SPACES})\s+)*)(?<!\w)((?:{_TYPE}))(?:<[^;(){{}}]*>)?\s*[*&](?=\s*(?:const\s*)?\w+\s*[=;,)]|\s*\))"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
REFUSED = {
    r"\bdouble\b": "there is no double",
    r"\bstd\s*::": "there is no std",
    r"\b(?:new|delete|try|catch|throw|goto|virtual|typeid|dynamic_cast|thread_local)\b": "the keyword is not allowed",
    r"\bstatic\s+(?!constexpr\b|constant\b)": "there is no static storage",
    r"\b(?:printf|malloc|memcpy|memset|assert)\s*\(": "there is no C library",
    r"\b__builtin_\w+|\basm\b": "clang's own names are not portable",
    r"\[[&=]?\]\s*\(": "there are no lambdas",
    r"\bif\s+constexpr\b": "C++17 is not there before Metal 4",
    r"(?<![\w.])\d+\.\d*(?![\dfFhH.eE])": "a number without f is a double",
}


def lint(signature: Signature) -> list[str]:
    """Sentences on a kernel's text, empty where there is nothing to say."""
    return [*words(signature.text), *spaces(signature)]


def words(text: str) -> list[str]:
    """What can be seen in the text alone."""
    text = re.sub(r"^\s*#.*$", "", _COMMENT.sub(" ", text), flags=re.MULTILINE)
    found = [f"{why}: {match[0].strip()}" for rule, why in REFUSED.items() for match in re.finditer(rule, text)]
    for match in _POINTER.finditer(text):
        before = text[max(0, match.start() - 16) : match.start()]
        expression = re.search(r"(?:[\w)\]]|operator)\s*$", before)  # `a * b`, not a declaration
        if not expression and not re.search(rf"\b(?:{_SPACES})\b", match[1]):
            found.append(f"a pointer or reference without an address space: {match[0].strip()}")
    return found


def spaces(signature: Signature) -> list[str]:
    """What clang says of the address spaces and of conversions."""
    made = subprocess.run(
        [clang(), *FLAGS, *FLAGS_OF_LINT, "-x", "c++", "-"],
        input=translate(signature),
        capture_output=True,
        text=True,
    )
    return [line for line in made.stderr.splitlines() if "error:" in line]
