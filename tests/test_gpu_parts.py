"""The parts of `make bench-gpu` run, here on the simulated accelerator with tiny sizes: a card is rare"""
import json,subprocess,sys
import pytest
from harness import *

script = Path(__file__).resolve().parents[1]/'benchmarks'/'gpu.py'
expected = dict(tests='told', costs='step', exact='exact=True', limits='seconds', rooms='memory', profile='share')

@simulated
@pytest.mark.parametrize('part', [*expected] if SWEEP else ['exact','rooms'])   # the others at night
def test_a_part_of_the_bench_runs(part, fakegpu):
    command = [sys.executable, '-W', 'ignore', script, '--dry', '--part', part]
    res = subprocess.run(command, capture_output=True, text=True)
    rows = [json.loads(o) for o in res.stdout.splitlines() if o.startswith('{"')]
    assert not res.returncode and any(o.get(expected[part]) is not None for o in rows), res.stderr[-2000:]
