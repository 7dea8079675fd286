"""The 61 phones of TIMIT and the 39 classes they are scored as (Lee & Hon 1989, as Graves et al. 2013)."""

_MERGED = {
    "aa": "aa ao",
    "ah": "ah ax ax-h",
    "er": "er axr",
    "hh": "hh hv",
    "ih": "ih ix",
    "l": "l el",
    "m": "m em",
    "n": "n en nx",
    "ng": "ng eng",
    "sh": "sh zh",
    "uw": "uw ux",
    "sil": "bcl dcl gcl pcl tcl kcl h# pau epi",
    "": "q",  # the glottal stop counts for nothing
}
_ALONE = "ae aw ay b ch d dh dx eh ey f g iy jh k ow oy p r s t th uh v w y z"

CLASS_OF = {phone: phone for phone in _ALONE.split()} | {
    phone: name for name, phones in _MERGED.items() for phone in phones.split()
}


class PhoneError(ValueError):
    """A symbol that is no TIMIT phone."""


def fold_phones(text: str) -> str:
    """Phones to their classes, "h# ix q zh" to "sil ih sh"; raises PhoneError for anything else."""
    unknown = [phone for phone in text.split() if phone not in CLASS_OF]
    if unknown:
        raise PhoneError(f"{unknown[0]!r} is not one of TIMIT's 61 phones")
    return " ".join(CLASS_OF[phone] for phone in text.split() if CLASS_OF[phone])
