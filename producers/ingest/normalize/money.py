"""Amounts: exact decimals with an ISO 4217 code; minor units by the currency's own exponent, never x 100 for all."""

from __future__ import annotations

from decimal import Decimal

_ZERO_DECIMALS = frozenset(
    {
        "BIF", "CLP", "DJF", "GNF", "ISK", "JPY", "KMF", "KRW", "MGA", "PYG", "RWF", "UGX", "UYI", "VND", "VUV", "XAF",
        "XOF", "XPF",
    }
)  # fmt: skip
_THREE_DECIMALS = frozenset({"BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND"})
# Stripe counts these in whole units or hundredths, whatever ISO says.
_STRIPE_ZERO_DECIMALS = _ZERO_DECIMALS - {"ISK", "UYI"}
_STRIPE_THREE_DECIMALS = frozenset(["BHD", "JOD", "KWD", "OMR", "TND"])


def currency_code(text: str | None) -> str | None:
    """The code in upper case, or None for what is none."""
    code = (text or "").strip().upper()
    return code if len(code) == 3 and code.isascii() and code.isalpha() else None


def exponent(currency: str) -> int:
    """How many decimals the currency has."""
    return 0 if currency in _ZERO_DECIMALS else 3 if currency in _THREE_DECIMALS else 2


def to_minor(amount: Decimal, currency: str) -> int:
    """Whole minor units (29790 for 297.90 BRL). Fractions of a minor unit are rounded half even."""
    return int(amount.scaleb(exponent(currency)).to_integral_value())


def in_units(amount: Decimal, currency: str) -> Decimal:
    """The amount with the currency's decimals (1500 BRL is 1500.00, 500.0 JPY is 500). No digit that counts is lost."""
    even = amount.quantize(Decimal(1).scaleb(-exponent(currency)))
    return even if even == amount else amount


def from_minor(minor: int, currency: str) -> Decimal:
    """Whole minor units as an amount in units, by the currency's own exponent."""
    return Decimal(minor).scaleb(-exponent(currency))


def from_stripe(minor: int, currency: str) -> Decimal:
    """Stripe's integer as an amount in units (29790 brl is 297.90)."""
    decimals = 0 if currency in _STRIPE_ZERO_DECIMALS else 3 if currency in _STRIPE_THREE_DECIMALS else 2
    return Decimal(minor).scaleb(-decimals)


def as_text(amount: Decimal) -> str:
    """The amount as payloads carry it: its own digits, no exponent."""
    return format(amount, "f")
