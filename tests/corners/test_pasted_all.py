"The cells of every lesson and how-to, and of the first half of every other page, run as a reader copies them"
import pytest
from pasted import *

@pytest.mark.parametrize('name', pages)
def test_cells_run_as_they_are_read(name, tmp_path):
    error = paste(cells(pages[name]), tmp_path)
    assert not error, error
