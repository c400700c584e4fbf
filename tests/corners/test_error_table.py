"The table of the page `Compared` is what `benchmarks/errors.py` measures"
import json,subprocess,sys
from importlib.util import find_spec
import pytest
from harness import *

root = Path(__file__).resolve().parents[2]
@pytest.fixture
def errors(monkeypatch):
    monkeypatch.syspath_prepend(root/'benchmarks')
    import errors
    return errors

def test_error_table(errors):
    """The table of the page "Compared" is what `benchmarks/errors.py` measures, and every figure of `AccumulateStep`
    is right"""
    saved = json.loads((root/'benchmarks'/'results'/'errors.json').read_text())
    loader = 'samples, windows of 64, a loader with `drop_last='
    right = {f'80 {loader}False':'0%', f'80 {loader}True':'20%', f'48 {loader}False':'0%', f'48 {loader}True':'raises ValueError',
             '64 samples':'0%', 'A fit ends with a smaller window':'0.00%', 'Is the learning rate':'right',
             'How many steps does':'100', 'The loss ends in':'trains on its mean', 'A fit is cancelled':'5 of 5'}
    def same(a, b):
        try: return float(a)==pytest.approx(float(b), rel=.05, abs=TOL, nan_ok=True)
        except ValueError: return a==b
    for row,old in zip(errors.table_rows(), saved['rows'], strict=True):
        assert all(map(same, row, old)), f'measured {row}, saved {old}'
        figure = next((v for k,v in right.items() if row[0].startswith(k)), None)
        assert row[4]==figure if figure else float(row[4])<=TOL, row

@pytest.mark.skipif(not find_spec('fastxtend'),
                    reason='compares with fastxtend, which is not installed: it is in the extra "integrations"')
def test_fastxtend_rules():
    """The rules of fastxtend that the table uses have the errors of fastxtend itself. It runs in its own process,
    since fastxtend adds a callback to every learner"""
    res = subprocess.run([sys.executable, '-W', 'ignore', root/'benchmarks'/'errors.py', '--fastxtend'],
                         capture_output=True, text=True)
    assert res.returncode==0, res.stdout+res.stderr
