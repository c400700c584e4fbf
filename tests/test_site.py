"""The built site in a real browser: every page on a wide and on a narrow screen, light and dark.

`make docs` builds it; Chromium comes with the system (Debian's package `chromium`), Playwright drives it."""
import shutil,threading,pytest
from functools import partial
from http.server import SimpleHTTPRequestHandler,ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote,urldefrag,urljoin,urlsplit

sync_api = pytest.importorskip('playwright.sync_api', reason="the site is looked at with Playwright: pip install -e '.[site]'")
SITE,CHROMIUM = Path(__file__).parent.parent/'_docs',shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
pages = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob('*.html')) if SITE.exists() else []
pytestmark = [pytest.mark.skipif(not CHROMIUM, reason='the site is looked at in Chromium, which is not installed: apt install chromium'),
              pytest.mark.skipif(not pages, reason='there is no site in _docs: make docs')]

class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args): pass

@pytest.fixture(scope='module')
def root():
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/'
    server.shutdown()

@pytest.fixture(scope='module')
def browser():
    with sync_api.sync_playwright() as p:
        res = p.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox'])
        yield res
        res.close()

@pytest.fixture
def page(browser, root):
    res = browser.new_page(viewport=dict(width=1280, height=900))
    res.route('**/*', lambda r: r.continue_() if local(r.request.url, root) else r.fulfill(status=200, body=''))   # a font, which a machine may not reach
    res.errors = []
    res.on('console', lambda m: res.errors.append(m.text) if m.type=='error' else None)
    res.on('pageerror', lambda e: res.errors.append(str(e)))
    yield res
    res.close()

def local(url, root): return url.startswith(root)

PROSE = "(() => { const o = document.querySelector('main').cloneNode(true); o.querySelectorAll('pre, code').forEach(c => c.remove()); return o.textContent })()"

@pytest.mark.parametrize('path', pages)
def test_page(path, page, root):
    "No console error, no failed request; images have a text and load; links and anchors lead somewhere"
    failed = []
    page.on('requestfailed', lambda r: failed.append(r.url) if local(r.url, root) else None)
    page.on('response', lambda r: failed.append(f'{r.status} {r.url}') if r.status>=400 and local(r.url, root) else None)
    page.goto(root+path, wait_until='load')
    assert not failed and not page.errors
    images = page.evaluate("[...document.images].map(o => [o.src, o.alt.trim(), o.naturalWidth])")
    assert not [src[:80] for src,alt,width in images if not alt or not width], 'an image without alternative text, or that does not load'
    assert '](' not in page.evaluate(PROSE), 'Markdown that is shown as it was written'
    broken = [href for href in page.evaluate("[...document.links].map(o => o.href)") if local(href, root) and not leads_somewhere(href, root)]
    assert not broken

def leads_somewhere(href, root):
    "Whether the page, and the anchor in it, are on the site"
    url,anchor = urldefrag(href)
    p = SITE/unquote(urlsplit(url).path).lstrip('/')
    if p.is_dir(): p = p/'index.html'
    return p.exists() and (not anchor or p.suffix!='.html' or f'id="{unquote(anchor)}"' in p.read_text())

@pytest.mark.parametrize('path', pages)
def test_on_a_phone(path, page, root):
    "On a screen of 390 pixels nothing is wider than the screen, code and tables included"
    page.set_viewport_size(dict(width=390, height=844))
    page.goto(root+path, wait_until='load')
    assert page.evaluate("document.documentElement.scrollWidth")<=390
    wide = page.evaluate("""[...document.querySelectorAll('main pre, main table, main img')]
        .filter(o => o.getBoundingClientRect().right>390.5 && !scrolls(o)).map(o => o.outerHTML.slice(0, 80));
        function scrolls(o) { for (let p = o; p; p = p.parentElement) if (['auto','scroll'].includes(getComputedStyle(p).overflowX) && p.getBoundingClientRect().right<=390.5) return true }""")
    assert not wide

CONTRAST = """(() => {
    const parse = c => c.match(/[0-9.]+/g).map(Number)
    const lum = c => { const [r,g,b] = c.slice(0,3).map(v => { v /= 255; return v<=.03928 ? v/12.92 : ((v+.055)/1.055)**2.4 }); return .2126*r+.7152*g+.0722*b }
    const behind = o => { for (; o; o = o.parentElement) { const c = parse(getComputedStyle(o).backgroundColor); if (c.length<4 || c[3]>.5) return c } return [255,255,255] }
    const texts = [...document.querySelectorAll('main p, main li, main td, main th, main h1, main h2, main h3, main pre code, main pre span, main a')].filter(o => o.innerText && o.innerText.trim())
    return texts.map(o => { const a = lum(parse(getComputedStyle(o).color)), b = lum(behind(o)); return [(Math.max(a,b)+.05)/(Math.min(a,b)+.05), o.innerText.slice(0,40)] })
})()"""

BACKGROUND = "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0,3).map(Number)"

@pytest.mark.parametrize('scheme', ['light','dark'])
@pytest.mark.parametrize('path', pages)
def test_readable(path, scheme, page, root):
    "Text stands out from what is behind it, by 3:1 at least (WCAG 2.1 asks that of large text), and most of it by 4.5:1"
    page.emulate_media(color_scheme=scheme)
    page.goto(root+path, wait_until='load')
    assert (sum(page.evaluate(BACKGROUND))<300)==(scheme=='dark'), 'the page does not follow the scheme of the system'
    ratios = page.evaluate(CONTRAST)
    assert ratios
    assert not [o for o in ratios if o[0]<3], 'hardly to be read'
    assert sum(r>=4.5 for r,_ in ratios)>=.95*len(ratios)

def test_search(page, root):
    "`AccumulateStep` leads to its page"
    page.goto(root+'index.html', wait_until='load')
    page.fill('input[type=search]', 'AccumulateStep')
    page.wait_for_selector('.search-result')
    assert any('core.html' in o for o in page.evaluate("[...document.querySelectorAll('.search-result')].map(o => o.href)"))
