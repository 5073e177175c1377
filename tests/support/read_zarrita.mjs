// Read arrays with zarrita.js: node read_zarrita.mjs NODE_MODULES < REQUESTS
//
// REQUESTS is a JSON list of {directory, path, way, selection}, a selection a list of
// [start, stop] for each dimension. Prints a list of {values} or {error}, the values flat.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const modules = process.argv[2];

// An import by name looks beside this file only, and the packages lie elsewhere.
function load(name, entry = ".") {
    const folder = join(modules, name);
    const { exports } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    return import(pathToFileURL(join(folder, exports[entry].import)).href);
}

const zarr = await load("zarrita");
const { default: FileSystemStore } = await load("@zarrita/storage", "./fs");

async function read({ directory, path, way, selection }) {
    let store = new FileSystemStore(directory);
    if (way === "consolidated") {
        store = await zarr.withConsolidatedMetadata(store);
    }
    const array = await zarr.open(zarr.root(store).resolve(path), { kind: "array" });
    const slices = selection.map(([start, stop]) => zarr.slice(start, stop));
    const { data, shape, stride } = await zarr.get(array, slices);
    return { values: inCOrder(data, shape, stride) };
}

function inCOrder(data, shape, stride) {
    let offsets = [0];
    shape.forEach((size, axis) => {
        offsets = offsets.flatMap((o) => Array.from({ length: size }, (_, i) => o + i * stride[axis]));
    });
    return offsets.map((o) => data[o] ?? null);
}

const outcomes = [];
for (const request of JSON.parse(readFileSync(0, "utf8"))) {
    outcomes.push(await read(request).catch((e) => ({ error: `${e.name}: ${e.message}` })));
}
console.log(JSON.stringify(outcomes));
