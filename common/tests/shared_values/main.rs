//! Model checks the seqlock of the shared values. A reader pulls while the shard updates; every
//! order of their loads and stores, with delayed stores, must return untorn values or none.

mod machine;
mod program;

use std::collections::HashSet;
use std::ops::ControlFlow;

use machine::explore;
use program::{Ending, PlantedFault, Script, programs};
use pushpull_common::shared_values::PinError;

/// Returns the endings that can be reached, up to the first torn one.
fn endings(script: Script, fault: PlantedFault) -> HashSet<Ending> {
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
fn no_order_of_loads_and_stores_tears_a_read() {
    let found = endings(Script::Changes, PlantedFault::None);
    // The exploration must reach each of these, or it would prove little.
    let expected = [
        Ending::Read(0),
        Ending::Read(1),
        Ending::Read(2),
        Ending::Read(3),
        Ending::Read(4),
        Ending::Not(PinError::Changing),
        Ending::Not(PinError::Closed),
    ];
    assert_eq!(found, HashSet::from(expected));
}

#[test]
fn a_read_is_discarded_after_another_process_took_the_values_over() {
    let found = endings(Script::TakenOver, PlantedFault::None);
    let expected = [
        Ending::Read(0),
        Ending::Read(1),
        Ending::Not(PinError::Changing),
        Ending::Not(PinError::Closed),
    ];
    assert_eq!(found, HashSet::from(expected));
}

#[test]
fn every_planted_fault_tears_a_read() {
    for (script, fault) in [
        (Script::Changes, PlantedFault::PinIgnored),
        (Script::Changes, PlantedFault::PinNotFenced),
        (Script::Changes, PlantedFault::SequenceNotFenced),
        (Script::Changes, PlantedFault::SequenceNotLoadedAgain),
        (Script::Changes, PlantedFault::PinsCheckedTooEarly),
        (Script::Changes, PlantedFault::SequenceNeverOdd),
        (Script::Changes, PlantedFault::RevocationIgnored),
        (Script::TakenOver, PlantedFault::OwnerGenerationIgnored),
    ] {
        assert!(is_torn(&endings(script, fault)), "{fault:?} is not found");
    }
}
