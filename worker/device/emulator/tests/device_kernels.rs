//! Runs the kernels of pushpull's devices: the emulator must know every instruction of them.
//!
//! Their own tests compare every kernel with the processor's. These load all of them, and run those
//! whose arguments are plain. Without the kernels in the tree, there is nothing to run.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use std::collections::BTreeMap;
use std::fs;

use support::Bench;

/// The texts of the modules by their names.
fn modules() -> BTreeMap<String, String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../src/cuda/kernels/ptx");
    let Ok(entries) = fs::read_dir(folder) else {
        println!("no kernels in the tree");
        return BTreeMap::new();
    };
    let paths = entries.map(|entry| entry.unwrap().path());
    let paths = paths.filter(|path| path.extension().is_some_and(|extension| extension == "ptx"));
    let name = |path: &std::path::Path| path.file_stem().unwrap().to_str().unwrap().to_owned();
    paths.map(|path| (name(&path), fs::read_to_string(&path).unwrap())).collect()
}

#[test]
fn every_module_is_loaded() {
    for (name, text) in modules() {
        let bench = Bench::new(&text);
        assert!(!bench.program.kernels.is_empty(), "{name}");
    }
}

#[test]
fn elementwise_kernels_compute_what_rust_does() {
    let Some(text) = modules().remove("elementwise") else { return };
    let mut bench = Bench::new(&text);
    let count = 5000u64;
    let x: Vec<f32> = (0..count).map(|i| (i as f32 - 2000.0) / 7.0).collect();
    let y: Vec<f32> = (0..count).map(|i| (i * i % 101) as f32 + 0.5).collect();
    let shape = ([4, 1], [256, 1]);
    let from = bench.upload(&x);
    let mut check = |kernel: &str, factor: Option<f32>, expected: &dyn Fn(f32, f32) -> f32| {
        let to = bench.upload(&y);
        let mut arguments = arguments![from, to, count].to_vec();
        if let Some(factor) = factor {
            arguments.insert(0, factor.to_le_bytes().to_vec());
        }
        bench.launch(kernel, shape, 0, &arguments).unwrap_or_else(|fault| panic!("{fault}"));
        let expected: Vec<f32> = x.iter().zip(&y).map(|(&x, &y)| expected(x, y)).collect();
        assert_eq!(bench.download::<f32>(to, count as usize), expected, "{kernel}");
    };
    check("axpy", Some(0.3), &|x, y| x.mul_add(0.3, y));
    check("add", None, &|x, y| x + y);
    check("mul", None, &|x, y| x * y);
    for (kernel, value) in [("scale", 0.3f32), ("fill", 4.5)] {
        let to = bench.upload(&y);
        bench.launch(kernel, shape, 0, arguments![value, to, count]).unwrap();
        let expected: Vec<f32> =
            y.iter().map(|y| if kernel == "fill" { value } else { y * value }).collect();
        assert_eq!(bench.download::<f32>(to, count as usize), expected, "{kernel}");
    }
}

#[test]
fn halves_are_rounded_and_widened() {
    let Some(text) = modules().remove("cast") else { return };
    let mut bench = Bench::new(&text);
    let shape = ([8, 1], [256, 1]);
    let count = 1u64 << 16;
    let halves: Vec<u32> = (0..count as u32 / 2).map(|i| (2 * i) | ((2 * i + 1) << 16)).collect();
    let input = bench.upload(&halves);
    for (widen, round) in [("widen_bf16", "round_bf16"), ("widen_f16", "round_f16")] {
        let wide = bench.room::<u32>(count as usize);
        let again = bench.room::<u16>(count as usize);
        bench.launch(widen, shape, 0, arguments![input, wide, count]).unwrap();
        bench.launch(round, shape, 0, arguments![wide, again, count]).unwrap();
        let values = bench.download::<f32>(wide, count as usize);
        let rounded = bench.download::<u32>(again, count as usize / 2);
        for (at, value) in values.into_iter().enumerate().filter(|(_, value)| !value.is_nan()) {
            let half = rounded[at / 2] >> (at % 2 * 16) & 0xffff;
            assert_eq!(half as usize, at, "{round} of {value}");
            if widen == "widen_bf16" {
                assert_eq!(value.to_bits(), (at as u32) << 16);
            }
        }
    }
}

#[test]
fn counts_of_chunks_are_added_up_in_order() {
    let Some(text) = modules().remove("codec") else { return };
    let mut bench = Bench::new(&text);
    // Fewer chunks than the block has threads, as many, and several times as many.
    for chunks in [1usize, 255, 256, 257, 700] {
        let counts: Vec<u32> = (0..2 * chunks as u32).map(|i| i * 7919 % 2049).collect();
        let place = bench.upload(&counts);
        bench
            .launch("top_k_scan", ([1, 1], [256, 1]), 0, arguments![place, chunks as u64])
            .unwrap();
        let before = |counts: &[u32]| -> Vec<u32> {
            (0..chunks).map(|chunk| counts[..chunk].iter().sum()).collect()
        };
        let expected = [before(&counts[..chunks]), before(&counts[chunks..])].concat();
        assert_eq!(bench.download::<u32>(place, 2 * chunks), expected, "{chunks}");
    }
}
