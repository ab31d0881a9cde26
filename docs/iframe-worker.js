// The search of the theme runs in a Worker, which a browser refuses to a page that was opened from a file. There, a hidden
// frame takes the worker's place: it runs the same script, and messages go back and forth between the two windows.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = this.inner = frame.contentWindow
      const page = inner.document
      const load = (source) => new Promise((done, failed) => {
        page.body.append(Object.assign(page.createElement("script"), { src: source, onload: done, onerror: failed, async: false }))
      })
      inner.importScripts = (...sources) => sources.reduce((before, each) => before.then(() => load(each)), Promise.resolve())
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = load(new URL(address, document.baseURI).href)
      this.addEventListener("message", (event) => this.onmessage && this.onmessage(event))
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
