//! Saves that are cut off at every operation; earlier checkpoints stay valid.

use std::sync::Arc;

use super::memory::Crash;
use super::samples::{Planted, SLOTS, check_restored, place, save, save_with, saved, variables};
use crate::{CheckpointError, CheckpointStorage, Retention, newest_good, retain};

fn save_and_retain(
    storage: &Arc<dyn CheckpointStorage>,
    catalogue: &pushpull_common::catalogue::Catalogue,
    step: u64,
    planted: Planted,
) -> Result<(), CheckpointError> {
    let published = save_with(storage, catalogue, step, planted)?;
    let retention = Retention { max_to_keep: 1, keep_every_hours: 0 };
    retain(&**storage, &published, &retention).map(|_| ())
}

#[test]
fn a_save_that_fails_anywhere_loses_no_earlier_checkpoint() {
    let catalogue = place(variables(2), 2, 1);
    for crash in [Crash::Kill, Crash::NamesFirst, Crash::PowerCut] {
        let mut operations = 0;
        loop {
            let (memory, storage) = saved(&catalogue, &[3]);
            memory.fail_after(operations);
            let outcome = save_and_retain(&storage, &catalogue, 7, Planted::Nothing);
            let failed = memory.crash(crash);
            let case = format!("{crash:?} after {operations} operations: {outcome:?}");

            let (mut opened, refused) = newest_good(&storage).expect(&case).expect(&case);
            assert!(refused.is_empty(), "{case}: {refused:?}");
            let step = opened.manifest().checkpoint.global_step;
            assert!(step == 7 || (step == 3 && outcome.is_err()), "{case}: step {step}");
            check_restored(&mut opened, &catalogue, &SLOTS, step);

            // The next save needs no help, and leaves nothing of the failed one.
            save_and_retain(&storage, &catalogue, 8, Planted::Nothing).expect(&case);
            assert_eq!(storage.list(None).unwrap(), ["ckpt-1-8"], "{case}");
            if !failed {
                break;
            }
            operations += 1;
        }
        assert!(operations > 40, "only {operations} operations were tried");
    }
}

#[test]
fn a_bit_flipped_on_disk_is_found_before_publication() {
    rot(Planted::Nothing);
}

#[test]
#[should_panic(expected = "a flipped bit")]
fn a_planted_save_that_is_not_read_back_is_caught() {
    rot(Planted::PublishBeforeVerify);
}

/// Saves with a flipped bit in each write, one after the other.
fn rot(planted: Planted) {
    let catalogue = place(variables(2), 2, 1);
    let (memory, storage) = saved(&catalogue, &[3]);
    let mut writes = 0;
    loop {
        memory.rot_after(writes);
        let outcome = save_and_retain(&storage, &catalogue, 7, planted);
        if memory.stop_rot() {
            assert!(outcome.is_ok() && writes >= 4, "two shards, a catalogue, a manifest");
            break;
        }
        let error = outcome.expect_err("a flipped bit").to_string();
        assert!(error.contains("ckpt-1-7"), "{error}");
        let (opened, refused) = newest_good(&storage).unwrap().unwrap();
        assert_eq!((opened.manifest().checkpoint.global_step, refused.len()), (3, 0));
        writes += 1;
    }
}

#[test]
fn a_delayed_writer_of_an_earlier_save_finds_no_folder() {
    let catalogue = place(variables(1), 1, 1);
    let (memory, storage) = saved(&catalogue, &[3]);
    // The save of step 5 failed after its folder was created. A newer folder is left alone.
    for folder in ["ckpt-1-5.tmp", "ckpt-1-99.tmp", "notes"] {
        memory.create_folder(folder).unwrap();
    }
    save(&storage, &catalogue, 5).unwrap();
    let folders = storage.list(None).unwrap();
    assert_eq!(folders, ["ckpt-1-3", "ckpt-1-5.1", "ckpt-1-99.tmp", "notes"]);
    assert!(storage.create("ckpt-1-5.tmp", "shard-0-0.safetensors").is_err());
}
