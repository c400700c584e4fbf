import json,random,sys
from pathlib import Path
import numpy as np,pytest,torch
# corners use the promise's cases
for o in 'corners','promise': sys.path.insert(0, str(Path(__file__).resolve().parent/o))
# the tensors are tiny, and threads that wait for each other make a busy machine ten times slower
torch.set_num_threads(1)

@pytest.fixture(autouse=True)
def seeds():
    "A test does the same in each run, whatever ran before it"
    random.seed(0); np.random.seed(0); torch.manual_seed(0)

results = {}   # of the rows of the page "Works with", by group and name

def pytest_addoption(parser):
    parser.addoption('--works-with', metavar='FILE', help='write what the rows of the page "Works with" measured')

@pytest.fixture
def works(request):
    "Takes what a test measures for its row"
    from matrix import Works
    return Works(request.node.get_closest_marker('row').kwargs, results, bool(request.config.getoption('--works-with')))

def pytest_sessionfinish(session, exitstatus):
    out = session.config.getoption('--works-with')
    if not out or exitstatus: return
    from matrix import all_rows,key
    missing = {key(r) for r in all_rows()}-set(results)
    if missing:
        session.exitstatus = 1
        return print(f'\n{out} is not written, since these rows were not measured (skipped, not selected, or in '
                     f'another process): {sorted(missing)}')
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent/'benchmarks'))
    from common import machine
    Path(out).write_text(json.dumps(dict(machine=machine(), rows=list(results.values())), indent=1)+'\n')
