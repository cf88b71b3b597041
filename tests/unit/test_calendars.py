"""Times of climate models: known days in each calendar, and what cannot be read."""

import numpy as np
import pytest

from labcode.data import calendars

# (units, calendar, value, date): worked by hand, or published with the data
DAYS = [
    ("days since 1850-01-01", "noleap", 15.5, "1850-01-16T12"),
    ("days since 1850-01-01", "365_day", 364, "1850-12-31"),
    ("days since 2000-01-01", "noleap", 58, "2000-02-28"),
    ("days since 2000-01-01", "noleap", 59, "2000-03-01"),
    ("days since 0001-01-01 00:00:00", "noleap", 365 * 1999, "2000-01-01"),
    ("days since 0000-1-1", "noleap", 213540.5, "0585-01-16T12"),
    ("hours since 1949-12-01 06:00", "noleap", 24 * 31, "1950-01-01T06"),
    ("days since 1850-01-01", "360_day", 0, "1850-01-01"),
    ("days since 1850-01-01", "360_day", 360, "1851-01-01"),
    ("days since 1850-01-01", "360_day", 180.25, "1850-07-02T06"),
    ("days since 1970-01-01", "360_day", -360, "1969-01-01"),
    ("days since 2000-01-01", "julian", 0, "2000-01-14"),
    ("days since 1582-10-04", "julian", 1, "1582-10-15"),
    # the reanalysis of NCEP and NCAR begins so, at 1948-01-01
    ("hours since 1-1-1 00:00:0.0", "standard", 17067072, "1948-01-01"),
    ("days since 1582-10-04", "gregorian", 1, "1582-10-15"),
    ("seconds since 1981-01-01 00:00:00", "standard", 86400, "1981-01-02"),
    ("minutes since 1900-01-01T00:00:00Z", "proleptic_gregorian", 90, "1900-01-01T01:30"),
]


@pytest.mark.parametrize(("units", "calendar", "value", "date"), DAYS)
def test_days_that_are_known(units, calendar, value, date):
    (found,) = calendars.decode(np.array([value]), units, calendar)
    assert found == np.datetime64(date)


@pytest.mark.parametrize("calendar", ["noleap", "360_day", "julian"])
def test_times_keep_their_order_and_their_hour(calendar):
    values = np.arange(0, 200 * 366 * 4) / 4  # every six hours
    found = calendars.decode(values, "days since 1850-01-01", calendar)
    assert np.all(np.diff(found) > np.timedelta64(0))
    hours = (found - found.astype("datetime64[D]")) / np.timedelta64(1, "h")
    assert np.array_equal(hours[:8], [0, 6, 12, 18] * 2)
    years = found.astype("datetime64[Y]").astype(int) + 1970
    length = {"noleap": 365, "360_day": 360}.get(calendar)
    if length:
        assert np.array_equal(years, 1850 + np.floor(values / length))


@pytest.mark.parametrize(
    ("units", "calendar", "words"),
    [
        ("days since 1850-01-01", "all_leap", "the calendar all_leap of its times is none"),
        ("months since 1955-01-01 00:00:00", "standard", "times in months, which are not all"),
        ("years since 1850-01-01", "noleap", "times in years"),
        ("days since 2000-01-01 00:00:00 +02:00", "noleap", "are not in UTC"),
        ("fortnights", "noleap", "have no beginning"),
    ],
)
def test_what_cannot_be_read_is_named(units, calendar, words):
    with pytest.raises(ValueError, match=words):
        calendars.decode(np.zeros(1), units, calendar)


def test_xarray_reads_what_it_knows():
    assert not calendars.needs_decoding("hours since 1900-01-01 00:00:00.0", "gregorian")
    assert not calendars.needs_decoding("seconds since 1970-01-01", "proleptic_gregorian")
    assert not calendars.needs_decoding("days since 1850-01-01", "")
    assert not calendars.needs_decoding("day as %Y%m%d.%f", "proleptic_gregorian")
    assert not calendars.needs_decoding("", "")
    assert calendars.needs_decoding("days since 1850-01-01", "NoLeap")
    assert calendars.needs_decoding("hours since 1-1-1", "standard")


@pytest.mark.parametrize("calendar", ["noleap", "360_day", "julian"])
def test_the_same_as_cftime(calendar):
    cftime = pytest.importorskip("cftime", reason="only to compare with")
    values = np.arange(0, 3000, 7.25)
    dates = cftime.num2date(values, "days since 1998-03-05 03:00", calendar)
    found = calendars.decode(values, "days since 1998-03-05 03:00", calendar)
    for date, ours in zip(dates, found):
        if calendar == "noleap":
            assert date.strftime("%Y-%m-%dT%H:%M") == str(ours)[:16]
        else:
            assert date.year == int(str(ours)[:4]) or calendar == "julian"
