// Bundles src/ into static/, which is committed and shipped: nobody needs Node to run or to package fastllm. Called by `make web`, which
// installs the pinned libraries into build/web first. With an argument, that folder is written instead (tests compare).

import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const modules = join(here, "..", "..", "build", "web", "node_modules");
const out = process.argv[2] ?? join(here, "static");
const esbuild = createRequire(join(modules, "x.js"))("esbuild");

const texts = {};
for (const name of ["en", "zh"]) texts[name] = (await import(pathToFileURL(join(here, "src", `${name}.js`)))).default;
const differing = Object.keys({ ...texts.en, ...texts.zh }).filter((key) => !(key in texts.en && key in texts.zh));
if (differing.length) throw new Error(`en.js and zh.js differ in ${differing}`);

mkdirSync(out, { recursive: true });
await esbuild.build({
  entryPoints: { app: join(here, "src", "app.js") },
  outdir: out,
  nodePaths: [modules],
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022", "safari16.4"],
  charset: "utf8",
  legalComments: "none", // NOTICE has the licences
  logLevel: "warning",
});
const css = await esbuild.transform(readFileSync(join(here, "src", "style.css"), "utf8"), { loader: "css", minify: true, charset: "utf8" });
writeFileSync(join(out, "app.css"), css.code);
for (const name of ["index.html", "icon.svg"]) copyFileSync(join(here, "src", name), join(out, name));
