"""Times of climate models as numpy dates: the calendars that numpy and xarray alone do not know.

    noleap, 365_day     365 days in every year             the date of the same name
    360_day             12 months of 30 days               the same part of the real year
    julian              a leap year every 4 years          the same day, which has another date
    standard            julian before 15 October 1582      the same day

A date keeps its year, its hour and its order, which is what training and the height of the sun ask
for. cftime would give objects of Python in their place, for one more package.

Source: CF conventions 1.11, section 4.4.1; Meeus 1998, Astronomical Algorithms, chapter 7, for the
    day number of a julian date.
Held by: tests/unit/test_calendars.py
"""

import re

import numpy as np

DAY_MS = 86_400_000
# of units of time, in milliseconds; CF takes them from UDUNITS
UNITS_MS = {
    "d": DAY_MS,
    "h": 3_600_000,
    "min": 60_000,
    "s": 1000,
    "ms": 1,
}
SINCE = re.compile(
    r"\s*(?P<unit>\w+)\s+since\s+(?P<year>[+-]?\d+)-(?P<month>\d+)-(?P<day>\d+)"
    r"(?:[ T]+(?P<hour>\d+)(?::(?P<minute>\d+))?(?::(?P<second>\d+(?:\.\d*)?))?)?"
    r"\s*(?P<zone>.*)",
    re.IGNORECASE,
)
NAMES = {"gregorian": "standard", "365_day": "noleap", "": "standard"}
NO_LEAP = np.cumsum([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30])  # days before each month
FIRST_GREGORIAN = (1582, 10, 15)


def needs_decoding(units: str, calendar: str) -> bool:
    """Whether `decode` is needed: xarray alone does not know the calendar, or not so far back.

    Args:
        units: Attribute of a time, as "days since 1850-01-01".
        calendar: Attribute of it; empty: it has none.
    """
    match = SINCE.match(units)
    if not match:
        return False
    calendar = NAMES.get(calendar.lower(), calendar.lower())
    if calendar == "proleptic_gregorian":
        return int(match["year"]) < 1
    return calendar != "standard" or _date(match) < FIRST_GREGORIAN


def decode(values: np.ndarray, units: str, calendar: str) -> np.ndarray:
    """Times as dates.

    Args:
        values: [T] numbers.
        units: Unit and origin, such as "days since 1850-01-01".
        calendar: Name of the calendar, such as "noleap".

    Returns:
        [T] numpy datetimes, in milliseconds.

    Raises:
        ValueError: A unit that is no fixed time, such as months; a calendar that is not known.
    """
    match = SINCE.match(units)
    if not match:
        raise ValueError(
            f"times in {units!r} have no beginning: write them as 'days since ...', for example "
            "with cdo -r copy IN OUT.nc"
        )
    calendar = NAMES.get(calendar.lower(), calendar.lower())
    unit = match["unit"].lower()
    is_month = calendar == "360_day" and unit in ("month", "months")  # all of them are alike
    unit_ms = 30 * DAY_MS if is_month else _unit_ms(unit)
    zone = match["zone"].strip().upper()
    if zone not in ("", "Z", "UTC", "GMT", "+0", "0:00", "+00:00", "+0:00", "00:00", "-00:00"):
        raise ValueError(f"times in {units!r} are not in UTC: write them so")
    start_ms = round(1000 * float(match["second"] or 0))
    start_ms += 60_000 * int(match["minute"] or 0) + 3_600_000 * int(match["hour"] or 0)
    # whole milliseconds: a float64 counts those of 9000 years without a gap
    passed_ms = np.round(np.asarray(values, np.float64) * unit_ms).astype(np.int64)
    days, rest_ms = np.divmod(passed_ms + start_ms, DAY_MS)
    days = _real_days(_date(match), days, calendar)
    return days.astype("datetime64[D]").astype("datetime64[ms]") + rest_ms.astype("timedelta64[ms]")


def _date(match: re.Match[str]) -> tuple[int, int, int]:
    return int(match["year"]), int(match["month"]), int(match["day"])


def _unit_ms(name: str) -> int:
    """Milliseconds of a unit, under any of its names."""
    names = {"day": "d", "hour": "h", "hr": "h", "minute": "min", "second": "s", "sec": "s"}
    names |= {"millisecond": "ms", "msec": "ms"}
    short = names.get(name.rstrip("s"), name)
    if short not in UNITS_MS:
        raise ValueError(
            f"times in {name}, which are not all of one length or none that are known: write them "
            "as days, for example with cdo setreftime,1850-01-01,00:00:00,days"
        )
    return UNITS_MS[short]


def _real_days(date: tuple[int, int, int], days: np.ndarray, calendar: str) -> np.ndarray:
    """Days since 1970-01-01 of the days after a date of some calendar, [T]."""
    year, month, day = date
    if calendar == "noleap":
        years, day_of_year = np.divmod(365 * year + NO_LEAP[month - 1] + day - 1 + days, 365)
        # of a leap year the dates after February come a day later
        after_february = day_of_year >= NO_LEAP[2]
        leap = (years % 4 == 0) & ((years % 100 != 0) | (years % 400 == 0))
        return _new_year(years) + day_of_year + (after_february & leap)
    if calendar == "360_day":
        years, day_of_year = np.divmod(360 * year + 30 * (month - 1) + day - 1 + days, 360)
        length = _new_year(years + 1) - _new_year(years)
        return _new_year(years) + day_of_year * length // 360
    if calendar == "julian" or (calendar == "standard" and date < FIRST_GREGORIAN):
        return _days_of_julian(year, month, day) + days
    if calendar in ("standard", "proleptic_gregorian"):
        start = np.datetime64(f"{year:04}-{month:02}-{day:02}", "D")
        return start.astype(np.int64) + days
    raise ValueError(
        f"the calendar {calendar} of its times is none that is known here, which are standard, "
        "proleptic_gregorian, noleap, 360_day and julian: write the times in one of these"
    )


def _new_year(years: np.ndarray) -> np.ndarray:
    """Days from 1970-01-01 to the first of January of some years, [T]."""
    since_1970 = (years - 1970).astype("datetime64[Y]")
    return since_1970.astype("datetime64[D]").astype(np.int64)


def _days_of_julian(year: int, month: int, day: int) -> int:
    """Days from 1970-01-01 of today's calendar to a date of the julian one."""
    if month <= 2:
        year -= 1
        month += 12
    # of whole days: the day number of noon, of which 1970-01-01 has 2440588
    number = (1461 * (year + 4716)) // 4 + (306001 * (month + 1)) // 10000 + day - 1524
    return number - 2440588
