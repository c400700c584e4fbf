"""The built site in a real browser: on a wide and on a narrow screen, light and dark; a page of each kind, and with
`SWEEP=1` in the environment every page.

`make docs` builds it; Chromium comes with the system (Debian's package `chromium`), Playwright drives it."""
import json,re,runpy,shutil,threading,pytest,yaml
from base64 import b64encode
from functools import partial
from http.server import SimpleHTTPRequestHandler,ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from PIL import Image
from harness import SWEEP

sync_api = pytest.importorskip('playwright.sync_api', reason="Playwright is not installed: pip install -e '.[site]'")
SITE = Path(__file__).resolve().parents[1]/'_docs'
CHROMIUM = next(filter(None, map(shutil.which, ('chromium','chromium-browser','google-chrome'))), None)
pages = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob('*.html')) if SITE.exists() else []
pytestmark = pytest.mark.skipif(not CHROMIUM, reason='Chromium is not installed: apt install chromium')
on_site = pytest.mark.skipif(not pages, reason='there is no site in _docs: make docs')
UNFOLD = "document.querySelectorAll('details').forEach(o => o.open = true)"
FEW = 'index core questions works_with tutorials/images howto/out_of_memory know/bench'.split()
drawn_pages = [p for p in pages if SWEEP or p.removesuffix('.html') in FEW]
on_each_page = lambda f: on_site(pytest.mark.parametrize('path', drawn_pages)(f))

@pytest.fixture(scope='module')
def root():
    quiet = type('Quiet', (SimpleHTTPRequestHandler,), dict(log_message=lambda *args: None))
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(quiet, directory=SITE))
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
    "A wide page that reaches this site only: what it asks from elsewhere, a font or a badge, comes back empty"
    res = browser.new_page(viewport=dict(width=1280, height=900))
    res.route('**/*', lambda r: r.continue_() if local(r.request.url, root) else r.fulfill(status=200, body=''))
    res.errors,res.asked = [],[]
    res.on('request', lambda r: None if local(r.url, root) else res.asked.append((r.resource_type, r.url)))
    res.on('console', lambda m: res.errors.append(m.text) if m.type=='error' else None)
    res.on('pageerror', lambda e: res.errors.append(str(e)))
    def show(path, height=None, scheme=None):
        "Go to `path`; with a `height`, on a phone"
        if height: res.set_viewport_size(dict(width=390, height=height))
        if scheme: res.emulate_media(color_scheme=scheme, reduced_motion='reduce')
        res.goto(root+path, wait_until='load')
    res.show = show
    yield res
    res.close()

def local(url, root): return url.startswith((root, 'data:'))

HELPERS = """
    const all = o => [...document.querySelectorAll(o)]
    const inside = o => o.getBoundingClientRect().right <= innerWidth+.5
    const isBox = o => ['auto', 'scroll'].includes(getComputedStyle(o).overflowX)
    const boxes = o => o ? [...(isBox(o) ? [o] : []), ...boxes(o.parentElement)] : []
    const leaves = o => !inside(o) && !boxes(o).some(inside)
    const rgba = c => {   // numbers to 255, and the opacity
        const [r, g, b, a=1] = c.match(/[0-9.]+/g).map(Number)
        return c.startsWith('color') ? [255*r, 255*g, 255*b, a] : [r, g, b, a]
    }
    const ground = o => rgba(getComputedStyle(o).backgroundColor)
    const behind = o => !o ? [255, 255, 255] : ground(o)[3] > .5 ? ground(o) : behind(o.parentElement)
    const linear = v => v <= .03928 ? v/12.92 : ((v+.055)/1.055)**2.4
    const lum = ([r, g, b]) => .2126*linear(r/255)+.7152*linear(g/255)+.0722*linear(b/255)
    const seen = (o, r=o.getBoundingClientRect()) =>
        o.contains(document.elementFromPoint(r.x+r.width/2, r.y+r.height/2))
"""
def js(page, expression, arg=None):
    "The value of an expression that may use `arg` and `HELPERS`"
    return page.evaluate(f'arg => {{ {HELPERS}\nreturn {expression} }}', arg)

def until(page, expression, arg=None):
    "Wait until such an expression is true, as long as the machine needs"
    page.wait_for_function(f'arg => {{ {HELPERS}\nreturn {expression} }}', arg=arg)

# The checks below look at the page that the browser shows, and return what is wrong with it.

def unrendered(page):
    "Formulas and Markdown that are shown as they were written"
    formulas = js(page, """all('main .math')
        .filter(o => !o.querySelector('math, mjx-container, .katex') || o.querySelector('merror, .katex-error'))
        .map(o => o.textContent)""")
    prose = page.evaluate("""() => {
        const o = document.querySelector('main').cloneNode(true)
        o.querySelectorAll('pre, code, annotation, script, style').forEach(c => c.remove())
        return o.textContent }""")
    return formulas + re.findall(r'.{,40}\]\(.{,40}|\$[^$\n]+\$|\\[()[\]].*|\\[a-zA-Z]{2,}.*', prose)

def cut(page, blocks='main pre'):
    "The longest line of each block of code or output that is wider than its box"
    return js(page, """all(arg).filter(o => o.scrollWidth > o.clientWidth)
        .map(o => o.innerText.split('\\n').reduce((a, b) => b.length>a.length ? b : a))""", blocks)

def wide_tables(page):
    "Tables that leave the page, or on a wide screen scroll; cells that are too wide or too narrow to be read"
    return js(page, """all('main table').flatMap(o => {
        const found = leaves(o) ? ['leaves the page'] : []
        const scrolls = boxes(o).some(p => p.scrollWidth > p.clientWidth+1)
        if (innerWidth > 1000 && scrolls) found.push('scrolls on a wide screen')
        for (const c of o.querySelectorAll('td, th')) {
            const {width} = c.getBoundingClientRect(), text = c.innerText
            const tooNarrow = width > 0 && width < 70 && text.length > 40   // 0: it is not shown
            if (width > innerWidth-20 || tooNarrow) found.push(`has ${width} pixels for: ${text}`)
        }
        return found.map(f => o.innerText.slice(0, 40).replace(/\\s+/g, ' ') + '… ' + f)
    })""")

def small_plots(page):
    "Plots that are larger than they were drawn, or smaller than three quarters of that: their letters cannot be read"
    return js(page, """all('main img[src^="data:image/png"]').filter(o => {
        const drawn = parseFloat(o.style.getPropertyValue('--drawn'))
        return !(o.width >= .74*drawn && o.width <= drawn+1)
    }).map(o => `${o.width} pixels, ${o.getAttribute('style')}: ${o.alt}`)""")

def white_boxes(page):
    "Pictures and elements that are light boxes (on a dark page)"
    res = js(page, """all('main, main *').filter(o => {
        const [r, g, b, a] = ground(o), {width, height} = o.getBoundingClientRect()
        return a > .5 && .2126*r+.7152*g+.0722*b > 128 && width > 50 && height > 20
    }).map(o => o.outerHTML.slice(0, 80))""")
    for o in page.query_selector_all('main img, main svg, main canvas, main video, main iframe'):
        box = o.bounding_box()
        if not box or min(box['width'], box['height'])<30: continue   # hidden, or a badge
        im = Image.open(BytesIO(o.screenshot())).convert('L')
        w,h = im.size
        sides = [im.crop(c) for c in [(0,0,w,3), (0,h-3,w,h), (0,0,3,h), (w-3,0,w,h)]]
        if light(im)>.25 or any(light(s)>.5 for s in sides):
            res.append(o.evaluate('o => o.alt || o.outerHTML.slice(0, 80)'))
    return res

def light(im): return sum(im.histogram()[200:])/(im.width*im.height)   # the share that is nearly white

def picture(style):
    "One that is white"
    Image.new('L', (8, 8), 255).save(png := BytesIO(), 'png')
    return f'<img style="{style}" src="data:image/png;base64,{b64encode(png.getvalue()).decode()}">'

wraps,sentence = 'white-space:pre-wrap; overflow-wrap:anywhere','Some words in a row. '*3

CHECKS = [   # what to look for, a page that has it, and one that does not
    (unrendered, 'The gradient $g_i$ of a sample', 'It costs $5'),
    (cut, f'<pre>{"x"*300}</pre>', f'<pre style="{wraps}">{"x"*300}</pre>'),
    (wide_tables, f'<table>{("<td>"+"x"*99)*2}</table>', f'<table style="width:50%"><td>{sentence*9}</table>'),
    (small_plots, picture('width:300px; --drawn:600px'), picture('width:500px; --drawn:600px')),
    (white_boxes, picture('width:200px'), picture('width:200px; filter:invert(.9)')),
    (white_boxes, f'<table style="background:#eee"><td>{sentence}</table>', f'<table><td>{sentence}</table>')]

def test_checks(page):
    "Each check finds what is wrong with a page that is made for it, and nothing in one that is right"
    style = 'margin:0; background:#222; color:#eee'
    for check,*bodies in CHECKS:
        for body,is_bad in zip(bodies, (True,False)):
            page.set_content(f'<!doctype html><body style="{style}"><main>{body}</main>')
            assert bool(check(page))==is_bad, (check.__name__, body)

@on_each_page
def test_page(path, page, root):
    "No error, no failed request; images have a text and load; nothing is cut or left in LaTeX"
    failed = []
    page.on('requestfailed', lambda r: failed.append(r.url) if local(r.url, root) else None)
    page.on('response', lambda r: failed.append(r.url) if r.status>=400 and local(r.url, root) else None)
    page.show(path)
    assert not failed and not page.errors
    assert not [o for o in page.asked if o[0]!='image'], 'fonts, styles and scripts are ours'
    images = page.evaluate("[...document.images].map(o => [o.src, o.alt.trim(), o.naturalWidth])")
    assert not [src[:80] for src,alt,width in images if not alt], 'no alternative text'
    assert not [src[:80] for src,alt,width in images if local(src, root) and not width], 'an image that does not load'
    assert not page.query_selector('.cell-output-stderr'), 'a warning that a cell has left'
    page.evaluate(UNFOLD)
    assert page.query_selector('#quarto-sidebar .sidebar-link'), 'no list of the pages'
    assert {f.__name__:found for f in (unrendered,cut,wide_tables,small_plots) if (found := f(page))}=={}

@on_each_page
def test_on_a_phone(path, page, root):
    "On a screen of 390 pixels nothing is wider than the screen, code and tables included"
    page.show(path, 844)
    page.evaluate(UNFOLD)
    assert page.evaluate("document.documentElement.scrollWidth")<=390
    wide = js(page, "all('main pre, main img').filter(leaves).map(o => o.outerHTML.slice(0, 80))")
    assert not wide and not wide_tables(page) and not small_plots(page)
    assert not cut(page, '.cell-output pre:not(.sourceCode)'), 'what is printed does not wrap'

TEXTS = 'main p, main li, main td, main th, main h1, main h2, main h3, main pre code, main pre span, main a, ' \
        '.sidebar-link, .navbar a'

def contrasts(page, texts):
    "How far texts stand out from what is behind them, each with its ratio"
    return js(page, """all(arg).filter(o => o.innerText?.trim()).map(o => {
        const s = getComputedStyle(o), c = rgba(s.color), alpha = c[3]*s.opacity, back = behind(o)
        const [a, b] = [lum(c.map((v, i) => alpha*v + (1-alpha)*back[i])), lum(back)].sort((x, y) => y-x)
        return [(a+.05)/(b+.05), o.innerText.slice(0, 40)]
    })""", texts)

def is_dark(page, selector): return sum(js(page, "ground(document.querySelector(arg)).slice(0, 3)", selector))<300

@pytest.mark.parametrize('scheme', ['light','dark'])
@on_each_page
def test_readable(path, scheme, page, root):
    "Text stands out by 3:1 at least (WCAG 2.1 asks that of large text), most of it by 4.5:1; no white box in the dark"
    page.show(path, scheme=scheme)
    page.wait_for_selector(f'.navbar[data-bs-theme={scheme}]')
    assert is_dark(page, 'body')==(scheme=='dark'), 'the page does not follow the scheme of the system'
    ratios = contrasts(page, TEXTS)
    assert ratios and not [o for o in ratios if o[0]<3], 'hardly to be read'
    assert sum(r>=4.5 for r,_ in ratios)>=.95*len(ratios)
    assert scheme=='light' or not white_boxes(page)

def search(page, words):
    "What a search finds, best first"
    page.fill('input[type=search]', '')
    page.wait_for_selector('.search-result', state='hidden')
    page.fill('input[type=search]', words)
    page.wait_for_selector('.search-result, .search-none')
    return js(page, "all('.search-result').map(o => o.getAttribute('href'))")

SEARCHES = [
    ('out of memory', 'howto/out_of_memory.html'), ('CUDA out of memory', 'howto/out_of_memory.html'),
    ('Ctrl-C', 'questions.html#what-is-left-after-ctrl-c'), ('batch norm', 'tutorials/keep_batch_norm.html'),
    ('gradient clipping', 'questions.html#how-do-i-clip-gradients'), ('my own loss', 'loss.html#your-own-loss'),
    ('dropout', 'howto/split_batches.html#batch-norm-and-dropout'), ('AccumulateStep', 'core.html')]

@on_site
def test_search(page, root):
    "The first thing found is what a reader wants first"
    page.show('index.html')
    for words,wanted in SEARCHES:
        found = search(page, words)
        assert found and wanted in found[0], (words, found[:5])
    page.show('tutorials/images.html')   # a page in a folder
    search(page, 'out of memory')
    page.press('input[type=search]', 'Enter')
    page.wait_for_url('**/howto/out_of_memory.html')

@on_site
@pytest.mark.parametrize('scheme', ['light','dark'])
def test_search_is_readable(scheme, page, root):
    "What a search finds, and the words that are marked in it, stand out by 4.5:1"
    page.show('index.html', scheme=scheme)
    search(page, 'out of memory')
    ratios = contrasts(page, '.smalldocs-search-results div, .smalldocs-search-results mark')
    assert len(ratios)>10 and not [o for o in ratios if o[0]<4.5]
    assert is_dark(page, 'input[type=search]')==(scheme=='dark'), 'the search box is as dark as the page'

DOCS,DEVELOPERS = SITE.parent/'.ci'/'docs.py',['windows.html','exact/lockstep.html','know/bench.html']

@on_site
def test_for_developers(page, root):
    "Their pages have a menu of their own, which the bar leads to; readers do not find them in theirs, or in a search"
    menu = lambda: js(page, "all('#quarto-sidebar a[href]').map(o => o.href)")
    page.show('index.html')
    readers = menu()
    found = json.loads((SITE/'search.json').read_text(encoding='utf-8'))
    page.click('.navbar >> text=For developers')
    page.wait_for_url('**/windows.html')
    for o in DEVELOPERS:
        assert root+o in menu() and root+o not in readers
        assert not [e for e in found if e['href'].startswith(o)]
    assert not {*readers}&{*menu()}
    assert not {*yaml.safe_load((DOCS.parent/'search.yml').read_text(encoding='utf-8'))}-{e['href'] for e in found}
    assert not [e for e in found if e['section']=='How it works']

def menus():
    "The notebooks of the menu for readers, and of that for developers"
    return runpy.run_path(str(DOCS), run_name='docs')['menus']()

def test_menus():
    "Each notebook stands in one menu, once, and each entry of a menu is a notebook"
    nbs = SITE.parent/'nbs'
    assert sorted(sum(menus(), []))==sorted(p.relative_to(nbs).as_posix() for p in nbs.rglob('*.ipynb'))

@on_each_page
def test_around_the_page(path, page, root):
    "The menu marks and shows the page's entry, the bar leads to the repository, and the page offers its notebook"
    page.show(path)
    here = js(page, """all('#quarto-sidebar .sidebar-link.active')
        .map(o => [o.href.split('#')[0], seen(o), +getComputedStyle(o).fontWeight >= 600])""")
    assert here==[[root+path, True, True]]
    assert page.query_selector('.navbar a[href="https://github.com/fastai-accum/fastai_accum"] >> visible=true')
    nb = Path(path).with_suffix('.ipynb')
    colab = 'https://colab.research.google.com/github/fastai-accum/fastai_accum/blob/main/nbs/'+nb.as_posix()
    links = js(page, "all('.notebook-links a').map(o => o.href)")
    text = (SITE/nb).read_text(encoding='utf-8')
    installs = 'pip install -Uqq git+https' in text
    assert links==[colab]*installs+[root+nb.as_posix()], 'Colab needs the line that installs'
    assert text==(SITE.parent/'nbs'/nb).read_text(encoding='utf-8')

@on_site
def test_readers_stop_where_developers_begin(page, root):
    "What is for developers is folded, and not in the list of the page; a link into it opens it"
    page.show('know/check.html')
    names = js(page, "all('#TOC a').map(o => o.innerText)")
    assert 'What it says' in names and not {'remedy','Cause','How it works'}&{*names}
    assert not js(page, "document.querySelector('details.developers').open")
    page.show('know/check.html#remedy')
    until(page, "document.querySelector('details.developers').open")

@on_site
@pytest.mark.parametrize('path,height', [('index.html',844), ('know/bench.html',400)])
def test_menu_on_a_phone(path, height, page, root):
    "It begins with its first entry, below the bar, and scrolls to its last"
    page.show(path, height)
    page.click('.quarto-btn-toggle')
    is_seen = "seen(all('#quarto-sidebar .sidebar-link').at(arg))"
    until(page, is_seen, 0)   # it slides in
    page.hover('#quarto-sidebar .sidebar-link >> nth=0')
    page.mouse.wheel(0, 5000)
    until(page, is_seen, -1)
