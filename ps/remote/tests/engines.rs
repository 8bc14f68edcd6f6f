//! Real stores keep the promises of a storage.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![cfg(all(feature = "s3", feature = "az", feature = "hdfs"))]

use std::io::ErrorKind;
use std::time::Duration;

use pushpull_checkpoint::CheckpointStorage;
use pushpull_remote::{RemoteError, RemoteOptions, RemoteStorage};

#[path = "../../../common/checkpoint/tests/conformance/mod.rs"]
mod conformance;
#[path = "engines/mod.rs"]
mod stores;

use stores::Engine;

fn keeps_the_promises(engine: &Engine) {
    conformance::check(&|| {
        let url = format!("{}/run/1", engine.url);
        let options = engine.options().part_bytes(5 << 20).claim_lease(Duration::from_secs(3));
        let storage: Box<dyn CheckpointStorage> =
            Box::new(RemoteStorage::open(&url, options).unwrap());
        storage
    });
}

#[test]
fn s3_keeps_the_promises() {
    let Some(engine) = Engine::moto() else { return };
    keeps_the_promises(&engine);
    let missing = RemoteStorage::open("s3://missing/run", engine.options()).unwrap_err();
    let RemoteError::Storage(fault) = missing else { panic!("{missing}") };
    assert_eq!((&*fault.path, fault.source.kind()), ("s3://missing/run", ErrorKind::NotFound));
}

#[test]
fn azure_keeps_the_promises() {
    let Some(engine) = Engine::azurite() else { return };
    keeps_the_promises(&engine);
    let missing = RemoteStorage::open("az://missing/run", engine.options()).unwrap_err();
    let RemoteError::Storage(fault) = missing else { panic!("{missing}") };
    assert_eq!((&*fault.path, fault.source.kind()), ("az://missing/run", ErrorKind::NotFound));
    let wrong = engine.options().value("AZURE_STORAGE_ACCOUNT_KEY", "d3JvbmcgaHVudGVyMg==");
    let denied = RemoteStorage::open("az://ckpt/run", wrong).unwrap_err();
    let RemoteError::Storage(fault) = denied else { panic!("{denied}") };
    let text = format!("{fault:?} {}", fault.source);
    assert_eq!(fault.source.kind(), ErrorKind::PermissionDenied, "{text}");
    assert!(!text.contains("d3Jvbmcg"), "{text}");
}

#[test]
fn hdfs_keeps_the_promises() {
    let Some(mut engine) = Engine::hdfs() else { return };
    keeps_the_promises(&engine);
    answers_in_safe_mode_are_asked_again(&engine);
    a_killed_name_node_is_not_waited_for(&mut engine);
}

fn answers_in_safe_mode_are_asked_again(engine: &Engine) {
    let url = format!("{}/safe", engine.url);
    let open = |seconds| {
        let options = engine.options().operation_timeout(Duration::from_secs(seconds));
        RemoteStorage::open(&url, options)
    };
    let patient = open(120).unwrap();
    let impatient = open(3).unwrap();
    engine.hdfs_admin(&["-safemode", "enter"]);
    let fault = impatient.create_folder("ckpt-0-1.tmp").unwrap_err();
    let text = fault.source.to_string();
    assert_eq!(fault.source.kind(), ErrorKind::TimedOut, "{text}");
    assert!(text.contains("safe mode"), "{text}");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| patient.create_folder("ckpt-0-2.tmp"));
        engine.hdfs_admin(&["-safemode", "leave"]);
        waiting.join().unwrap().unwrap();
    });
    patient.remove_folder("ckpt-0-2.tmp").unwrap();
}

/// The client itself hangs. A save fails, and works again once the NameNode is back.
fn a_killed_name_node_is_not_waited_for(engine: &mut Engine) {
    let options = engine.options().operation_timeout(Duration::from_secs(5));
    let storage = RemoteStorage::open(&format!("{}/killed", engine.url), options).unwrap();
    storage.create_folder("ckpt-0-1.tmp").unwrap();
    let mut file = storage.create("ckpt-0-1.tmp", "data").unwrap();
    file.write(&conformance::content(3 << 20, 1)).unwrap();
    engine.kill_name_node();
    let fault = file.sync().unwrap_err();
    assert!(fault.path.ends_with("/killed/ckpt-0-1.tmp/data"), "{fault:?}");
    drop(file);
    let fault = storage.list(None).unwrap_err();
    assert_eq!(fault.source.kind(), ErrorKind::TimedOut, "{}", fault.source);
    engine.start_name_node();
    // The directory of a killed save is there, and the next save removes it.
    let later = engine.open("killed");
    assert_eq!(later.list(None).unwrap(), ["ckpt-0-1.tmp"]);
    let claim = later.claim().unwrap();
    assert_eq!(later.list(None).unwrap(), [""; 0]);
    drop(claim);
}
