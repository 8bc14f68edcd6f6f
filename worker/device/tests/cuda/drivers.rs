//! Drivers that cannot be used: each in a process of its own, which finds it by the path of
//! libraries.

use std::path::Path;
use std::process::Command;

use pushpull_cuda_emulator::control::link_as_driver;
use pushpull_cuda_emulator::turn::DriverTurn;
use pushpull_device::{ComputeError, Device, cuda_devices, devices};

/// The environment variable of a process that finds the driver of another test.
pub(crate) const CHILD: &str = "PUSHPULL_DEVICE_TEST_CHILD";

/// Prints what the process sees. As a test by itself, it sees the driver of the tests.
#[test]
fn what_a_process_sees_agrees() {
    let _turn = std::env::var_os(CHILD).is_none().then(DriverTurn::start);
    let opened = Device::cuda(0);
    match &opened {
        Ok(device) => println!("opened {device}, cuBLAS {:?}", device.uses_cublas()),
        Err(error) => println!("refused: {error}"),
    }
    let listed = cuda_devices();
    match &listed {
        Ok(list) => println!("{} devices", list.len()),
        Err(error) => println!("none: {error}"),
    }
    let (device, reason) = Device::auto().unwrap();
    println!("auto {device} {}", reason.is_some());
    let names: Vec<String> = devices().into_iter().map(|info| info.name).collect();
    println!("all {names:?}");
    assert_eq!(reason, opened.as_ref().err().cloned());
    assert_eq!(device.uses_host_memory(), reason.is_some());
    assert_eq!(names.len(), 1 + listed.map_or(0, |list| list.len()));
}

/// Returns what a process sees whose driver is in a folder.
fn seen(folder: &Path, settings: &[(&str, &str)]) -> String {
    output_of("drivers::what_a_process_sees_agrees", folder, settings)
}

/// Runs a test in a process that finds its libraries in a folder. Returns what it prints.
pub(crate) fn output_of(test: &str, folder: &Path, settings: &[(&str, &str)]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]);
    command.env(CHILD, "1").env("LD_LIBRARY_PATH", folder).envs(settings.iter().copied());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns a folder with the emulated driver.
pub(crate) fn emulated() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    link_as_driver(folder.path()).unwrap();
    folder
}

#[test]
fn a_driver_is_found_by_the_path_of_libraries() {
    let folder = emulated();
    let seen_one = seen(folder.path(), &[]);
    assert!(seen_one.contains("opened cuda:0, cuBLAS"), "{seen_one}");
    assert!(seen_one.contains("auto cuda:0 false"), "{seen_one}");
    assert!(seen_one.contains("all [\"cpu\", \"cuda:0\"]"), "{seen_one}");
}

#[test]
fn a_driver_without_devices_is_refused() {
    let folder = emulated();
    let seen =
        seen(folder.path(), &[("PUSHPULL_EMULATOR_DEVICES", "0"), ("CUDA_VISIBLE_DEVICES", "3")]);
    let expected = "refused: cannot open cuda:0: the driver has 0 devices \
                    (CUDA_VISIBLE_DEVICES=\"3\")";
    assert!(seen.contains(expected), "{seen}");
    assert!(seen.contains("0 devices") && seen.contains("auto cpu:"), "{seen}");
}

#[test]
fn an_old_driver_is_refused() {
    let folder = emulated();
    let seen = seen(folder.path(), &[("PUSHPULL_EMULATOR_DRIVER_VERSION", "11040")]);
    let expected = "refused: cannot use CUDA: the driver is of version 11.4, and 12.0 is needed";
    assert!(seen.contains(expected), "{seen}");
    assert!(seen.contains("none: cannot use CUDA") && seen.contains("auto cpu:"), "{seen}");
}

/// Compiles a library. Returns `false` without a C compiler.
pub(crate) fn compile(text: &str, folder: &Path, library: &str) -> bool {
    let source = folder.join("source.c");
    std::fs::write(&source, format!("{text}\n")).unwrap();
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-o"]).arg(folder.join(library)).arg(&source);
    let Ok(status) = command.status() else { return false };
    assert!(status.success(), "{library} does not compile");
    true
}

#[test]
fn a_cublas_that_cannot_be_used_is_not() {
    let folder = emulated();
    let library = folder.path().join("libcublas.so");
    let named = [("PUSHPULL_CUBLAS", library.to_str().unwrap())];
    assert!(seen(folder.path(), &named).contains("cuBLAS Ok(false)"), "there is no such file");
    let mut functions = vec!["int cublasCreate_v2(void **handle) { return 1; }"];
    for function in [
        "int cublasDestroy_v2(void *handle) { return 0; }",
        "int cublasSetStream_v2(void *handle, void *stream) { return 0; }",
        "int cublasSgemm_v2() { return 0; }",
    ] {
        functions.push(function);
        if !compile(&functions.join("\n"), folder.path(), "libcublas.so") {
            return println!("SKIPPED: no cuBLAS is refused, there is no C compiler");
        }
        // The first libraries lack a function, the last cannot open the device.
        assert!(seen(folder.path(), &named).contains("cuBLAS Ok(false)"), "{function}");
    }
    functions[0] = "int cublasCreate_v2(void **handle) { return 0; }";
    compile(&functions.join("\n"), folder.path(), "libcublas.so");
    assert!(seen(folder.path(), &named).contains("cuBLAS Ok(true)"));
    assert!(seen(folder.path(), &[("PUSHPULL_CUBLAS", "none")]).contains("cuBLAS Ok(false)"));
}

#[test]
fn a_driver_that_lacks_a_function_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    if !compile("int cuInit(unsigned flags) { return 100; }", folder.path(), "libcuda.so.1") {
        return println!("SKIPPED: no driver lacks a function, there is no C compiler");
    }
    let seen = seen(folder.path(), &[]);
    let expected = "refused: cannot use CUDA: the driver has no function cuCtxSetCurrent";
    assert!(seen.contains(expected), "{seen}");
}

#[test]
fn a_machine_without_a_driver_computes_on_the_processor() {
    // In a process of its own: this one may have loaded the emulator.
    let folder = tempfile::tempdir().unwrap();
    let seen = seen(folder.path(), &[]);
    if seen.contains("opened cuda:0") {
        return println!("SKIPPED: no driver is missing, this machine has one");
    }
    let error = ComputeError::NoDriver { tried: &["libcuda.so.1", "libcuda.so"] };
    if !seen.contains(&format!("refused: {error}")) {
        return println!("SKIPPED: no driver is missing, this machine has one without a device");
    }
    assert!(seen.contains("auto cpu:") && seen.contains("true"), "{seen}");
    assert!(seen.contains("all [\"cpu\"]"), "{seen}");
}
