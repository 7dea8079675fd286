"""How speakers of Mandarin say English: substitutions of phones that they are known for, drawn by chance.

For synthetic speech by voices that speak other languages: the words stay what they are, some of their phones become
those that learners say instead (e.g. Zhang & Yin 2009, "A study of pronunciation problems of English learners in
China"). Phones are written as Kokoro reads them: IPA, diphthongs as capitals, stress before the vowel.
"""

import re

import numpy as np

VOWELS = "ɑɐɒæɔəɚɛɜɪiouʊʌaeAIOQWY"
VOICELESS = str.maketrans("zdbɡʤvʒ", "stpkʧfʃ")
END = r"(?=[\s.,;:!?—…\"”)]|$)"  # of a word

# Each: where, what is said instead (one of these), and how often where an accent is as strong as it gets.
RULES: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("θ", ("s", "s", "f", "t"), 0.8),
    ("ð", ("d", "z", "l"), 0.7),
    ("v", ("w", "f"), 0.5),
    ("ʒ", ("ʃ", "ɹ"), 0.5),
    ("ɪ", ("i",), 0.4),
    ("i", ("ɪ",), 0.15),
    ("æ", ("ɛ", "ɑ"), 0.5),
    ("ʊ", ("u",), 0.5),
    ("ʌ", ("ɑ", "ə"), 0.4),
    ("A", ("ɛ",), 0.25),
    ("O", ("ɔ",), 0.3),
    (rf"(?<=[{VOWELS}])l(?![{VOWELS}ˈˌ])", ("ʊ", "ɹ", ""), 0.5),
    (rf"(?<=[{VOWELS}])ŋ{END}", ("n",), 0.3),
    (rf"(?<=[{VOWELS}])n{END}", ("ŋ",), 0.2),
    (rf"(?<=[{VOWELS}])m{END}", ("n",), 0.15),
    ("T", ("t", "d"), 0.6),  # the flap of "water"
    (rf"(?<=[^\s{VOWELS}ˈˌ])[tdkpb]{END}", ("",), 0.4),  # the last of several consonants
    (rf"(?<=[{VOWELS}])[tdkpbɡ]{END}", ("",), 0.15),
    (rf"(?<=[tdkpbɡsʃʧʤf]){END}", ("ə",), 0.12),  # a vowel after it
    ("ə", ("ɛ", "ɑ", "ɔ"), 0.25),
    ("ˌ", ("ˈ",), 0.5),
    ("ɹ", ("l", "w"), 0.06),
    ("h", ("x",), 0.4),
    (rf"[zdbɡʤv]{END}", (), 0.6),  # without voice
)


def with_accent(phones: str, strength: float, rng: np.random.Generator) -> str:
    """`phones` as somebody says them whose accent is `strength` (0 none, 1 as strong as it gets)."""
    if not strength:
        return phones
    for pattern, instead, chance in RULES:

        def say(match: re.Match[str], instead: tuple[str, ...] = instead, chance: float = chance) -> str:
            if rng.random() >= chance * strength:
                return match[0]
            return instead[rng.integers(len(instead))] if instead else match[0].translate(VOICELESS)

        phones = re.sub(pattern, say, phones)
    return phones
