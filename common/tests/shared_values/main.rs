//! A reader beside the shard that changes what it reads: every order of their loads and stores, with
//! stores that are seen late, and no torn values in any of them.

mod machine;
mod program;

use std::collections::HashSet;
use std::ops::ControlFlow;

use machine::explore;
use program::{Ending, Fault, Script, programs};
use pushpull_common::shared_values::NotNow;

/// The endings that are reached, up to the first that is torn.
fn endings(script: Script, fault: Fault) -> HashSet<Ending> {
    let (shard, reader) = programs(script, fault);
    let mut endings = HashSet::new();
    explore(fault, &shard, &reader, |ending| {
        endings.insert(ending);
        match ending {
            Ending::Torn { .. } => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    });
    endings
}

fn is_torn(endings: &HashSet<Ending>) -> bool {
    endings.iter().any(|ending| matches!(ending, Ending::Torn { .. }))
}

#[test]
fn no_order_of_loads_and_stores_tears_what_is_read() {
    let found = endings(Script::Changes, Fault::None);
    // Each of these can happen, or this would not show much.
    let expected = [
        Ending::Read(0),
        Ending::Read(1),
        Ending::Read(2),
        Ending::Read(3),
        Ending::Read(4),
        Ending::Not(NotNow::Changing),
        Ending::Not(NotNow::Over),
    ];
    assert_eq!(found, HashSet::from(expected));
}

#[test]
fn values_that_another_process_has_taken_over_are_thrown_away() {
    let found = endings(Script::TakenOver, Fault::None);
    let expected = [
        Ending::Read(0),
        Ending::Read(1),
        Ending::Not(NotNow::Changing),
        Ending::Not(NotNow::Over),
    ];
    assert_eq!(found, HashSet::from(expected));
}

#[test]
fn every_planted_fault_tears() {
    for (script, fault) in [
        (Script::Changes, Fault::PinIgnored),
        (Script::Changes, Fault::PinNotFenced),
        (Script::Changes, Fault::SequenceNotFenced),
        (Script::Changes, Fault::SequenceNotLoadedAgain),
        (Script::Changes, Fault::SequenceLate),
        (Script::Changes, Fault::SequenceNeverOdd),
        (Script::Changes, Fault::RevokedUnseen),
        (Script::TakenOver, Fault::OwnerGenerationUnseen),
    ] {
        assert!(is_torn(&endings(script, fault)), "{fault:?} is not found");
    }
}
