"""What every picture shares."""

import warnings

from matplotlib.figure import Figure

from attnsuite.reports.plot import as_svg


def test_character_that_the_font_lacks_stands_in_the_picture_without_a_warning():
    figure = Figure(layout="constrained")
    figure.suptitle("half \U000e8941 drawn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "half " in as_svg(figure)
