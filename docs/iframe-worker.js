// Search in pages that are opened as files: there, browsers refuse to start a worker.
// The script of the worker runs in a frame instead. The plugin "offline" would ask another host
// for such a script on each page. The theme looks for the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.started = new Promise((resolve, reject) => {
        frame.onload = () => {
          const scope = frame.contentWindow;
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = scope.document.createElement("script");
          script.src = url;
          script.onload = () => resolve(scope);
          script.onerror = reject;
          scope.document.head.append(script);
        };
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.started.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
