"""Phone numbers in one form for matching: E.164, Brazilian mobiles with their ninth digit.

WhatsApp still names many Brazilian accounts without the ninth digit, so one person comes in two forms: the canonical
one is for matching, the form as received is for sending. Numbers of other countries are taken as they are (Mexico and
Argentina have the same trouble; joining theirs would be a guess). What cannot be read is no phone: an order without a
usable phone is still an order.
"""

from __future__ import annotations

import re

import phonenumbers

BRAZIL = "BR"
MAX_TEXT = 100
_E164 = re.compile(r"\+[1-9][0-9]{6,14}\Z")
_PUNCTUATION = re.compile(r"[\s().\-/\u00a0]+")
_EXTENSION = re.compile(r"(?i)\s*(?:x|ext\.?|ramal)\s*\d{1,6}\Z")
_FIRST_AREA, _LAST_AREA = 11, 99


def canonical(text: str | None, country: str = BRAZIL) -> str | None:
    """The number in E.164, or None. `country` is where a number without a country code would be dialled."""
    if not text or len(text) > MAX_TEXT:
        return None
    compact = _PUNCTUATION.sub("", _EXTENSION.sub("", text.strip()))
    international = compact.startswith("+")
    digits = compact.removeprefix("+")
    if not digits.isascii() or not digits.isdigit() or not 7 <= len(digits) <= 20:
        return None
    if digits.startswith("00"):
        international, digits = True, digits.lstrip("0")
    if international:
        return _brazilian(digits[2:]) if digits.startswith("55") else _e164(digits)
    if country == BRAZIL:
        return _brazilian(_national(digits))
    return _foreign(digits, country)


def whatsapp(wa_id: str | None) -> str | None:
    """The canonical form of a WhatsApp id: digits, country code first, taken on trust (WhatsApp knows the number)."""
    if not wa_id:
        return None
    digits = wa_id.strip().removeprefix("+")
    if not digits.isascii() or not digits.isdigit():
        return None
    if digits.startswith("55") and (brazilian := _brazilian(digits[2:])):
        return brazilian
    return _e164(digits)


def _national(digits: str) -> str:
    """Area code and number: without the country code, leading zeros and a carrier code (0 15 11 ...)."""
    stripped = digits.lstrip("0")
    if digits.startswith("0") and len(stripped) in (12, 13) and not stripped.startswith("55"):
        return stripped[2:]
    if len(stripped) in (12, 13) and stripped.startswith("55"):
        return stripped[2:]
    return stripped


def _brazilian(national: str) -> str | None:
    """+55, area code and number, the ninth digit put in where a mobile lacks it."""
    area, number = national[:2], national[2:]
    if not area.isdigit() or not _FIRST_AREA <= int(area) <= _LAST_AREA or area[1] == "0":
        return None
    if len(number) == 8 and number[0] in "6789":
        number = "9" + number
    landline, mobile = len(number) == 8 and number[0] in "2345", len(number) == 9 and number[0] == "9"
    return f"+55{area}{number}" if landline or mobile else None


def _foreign(digits: str, country: str) -> str | None:
    try:
        number = phonenumbers.parse(digits, country)
    except phonenumbers.NumberParseException:
        return None
    if not phonenumbers.is_valid_number(number):
        return None
    return phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.E164)


def _e164(digits: str) -> str | None:
    text = f"+{digits}"
    return text if _E164.match(text) else None
