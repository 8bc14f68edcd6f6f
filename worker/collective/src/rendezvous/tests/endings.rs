//! How rings end, and what their members hear of it.

use std::time::Duration;

use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::message::{
    Collective, Heartbeat, Leave, Left, RingEnd, RingEntered, RingJoin, RingOperation, RingOver,
};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Message, Refusal};

use super::{Formed, LEASE, Meeting, WINDOW, again, config, hello, join, lost};
use crate::rendezvous::{RendezvousConfig, RendezvousInput};

fn difference(rank: u32, other_rank: u32) -> RingEnd {
    let operation = |count| RingOperation {
        collective: Collective::ReduceSum {},
        elements: 0,
        count,
        name: Text::clipped("w"),
        codec: None,
    };
    RingEnd::Difference {
        number: 9,
        rank,
        operation: operation(1),
        other_rank,
        other: operation(2),
    }
}

fn given_up(rank: u32) -> RingEnd {
    RingEnd::GivenUp { rank, detail: Text::clipped("interrupted") }
}

//
#[test]
fn a_broken_connection_ends_the_ring_once() {
    let mut meeting = Meeting::new(1);
    let [a, b, c, d] = meeting.four();
    meeting.pass(LEASE / 8);
    meeting.close(c);
    let end = lost(2, "c", LEASE / 8, "connection reset");
    for member in [a, b, d] {
        assert_eq!(meeting.end(member), RingOver { epoch: 1, end: end.clone() });
    }
    // Other ends of the same epoch come too late.
    meeting.close(d);
    meeting.send(a, RingOver { epoch: 1, end: given_up(0) });
    assert!(meeting.is_silent(a) && meeting.is_silent(b));
    meeting.send(b, again("b", 1));
    meeting.send(a, again("a", 1));
    assert_eq!(meeting.formed(a), Formed { epoch: 2, rank: 0, indices: vec![0, 1] });
    assert_eq!(meeting.formed(b).epoch, 2);
    // So does the end of an older ring.
    meeting.send(a, RingOver { epoch: 1, end: given_up(0) });
    assert!(meeting.is_silent(a) && meeting.is_silent(b));
}

//
#[test]
fn a_silent_member_is_lost_within_its_lease() {
    let mut meeting = Meeting::new(1);
    let [a, b, c, d] = meeting.four();
    meeting.pass(LEASE);
    meeting.mute.insert(b);
    let heard = meeting.now;
    meeting.pass(LEASE - Duration::from_millis(1));
    assert!(meeting.is_silent(a));
    meeting.pass(Duration::from_millis(1));
    let over = RingOver { epoch: 1, end: lost(1, "b", meeting.now - heard, "") };
    for member in [a, c, d] {
        assert_eq!(meeting.end(member), over);
    }
    // The lost one is told as well, in case it lives.
    assert_eq!(meeting.end(b), over);
    assert!(!meeting.open.contains(&b));
    assert_eq!(meeting.open.len(), 3);
}

#[test]
fn a_silent_member_does_not_wait_any_longer() {
    let mut meeting = Meeting::new(4);
    let stranger = meeting.arrive(hello(9));
    let a = meeting.join(join("a"));
    let b = meeting.join(join("b"));
    meeting.mute.extend([a, stranger]);
    meeting.pass(LEASE + LEASE / 16);
    let refusal = meeting.refusal(a).to_string();
    assert_eq!(refusal, "waited 4000 ms for a heartbeat of this member");
    meeting.refusal(stranger);
    assert_eq!(meeting.waits(b), (1, 4, vec![1, 2, 3]));
}

#[test]
fn the_time_in_which_nobody_listened_is_no_silence() {
    let mut meeting = Meeting::new(1);
    let [a, b, ..] = meeting.four();
    meeting.pass(LEASE);
    meeting.now += 10 * LEASE;
    meeting.send(a, super::Heartbeat {});
    meeting.pass(LEASE);
    assert!(meeting.is_silent(a) && meeting.is_silent(b));
    meeting.mute.insert(b);
    meeting.now += 10 * LEASE;
    meeting.pass(LEASE / 2);
    assert!(matches!(meeting.end(a).end, RingEnd::Lost { rank: 1, .. }));
}

// A rendezvous that was stopped for less than a lease may not have read for one.
#[test]
fn a_short_stop_of_the_rendezvous_loses_nobody() {
    for stopped in [LEASE * 7 / 8, LEASE, LEASE + LEASE / 16] {
        let mut meeting = Meeting::new(1);
        let [a, b, ..] = meeting.four();
        meeting.pass(LEASE);
        meeting.now += LEASE / 5;
        meeting.handle(RendezvousInput::Tick);
        meeting.now += stopped;
        meeting.handle(RendezvousInput::Tick);
        // The heartbeats are read only now.
        meeting.pass(2 * LEASE);
        assert!(meeting.is_silent(a) && meeting.is_silent(b), "{stopped:?}");
    }
}

//
#[test]
fn the_first_report_of_a_member_ends_the_ring_for_all() {
    let ends = [difference(0, 3), given_up(2), RingEnd::Regrouped {}];
    for end in ends {
        let mut meeting = Meeting::new(1);
        let members = meeting.four();
        meeting.send(members[2], RingOver { epoch: 1, end: end.clone() });
        meeting.send(members[1], RingOver { epoch: 1, end: given_up(1) });
        for member in members {
            assert_eq!(meeting.end(member), RingOver { epoch: 1, end: end.clone() });
        }
    }
}

//
#[test]
fn a_false_report_is_refused_and_its_member_lost() {
    let table = [
        (difference(0, 4), "a difference is between two of 4 ranks, not 0 and 4"),
        (difference(1, 1), "a difference is between two of 4 ranks, not 1 and 1"),
        (given_up(1), "rank 2 reports that rank 1 has given up"),
        (RingEnd::Left { rank: 1 }, "losses and leaves are reported by the rendezvous"),
        (lost(1, "b", LEASE, ""), "losses and leaves are reported by the rendezvous"),
    ];
    for (end, fault) in table {
        let mut meeting = Meeting::new(1);
        let [a, _, c, _] = meeting.four();
        meeting.send(c, RingOver { epoch: 1, end });
        let refusal = meeting.refusal(c).to_string();
        assert!(refusal.ends_with(fault), "{refusal}");
        let RingEnd::Lost { rank: 2, detail, .. } = meeting.end(a).end else { panic!("not lost") };
        assert!(detail.as_str().ends_with(fault), "{detail}");
    }
}

//
#[test]
fn a_member_leaves_and_gives_its_index_up() {
    let mut meeting = Meeting::new(1);
    let [a, b, c, d] = meeting.four();
    meeting.send(b, Leave {});
    assert_eq!(meeting.take(b), [Message::from(Left {})]);
    assert!(!meeting.open.contains(&b));
    let over = RingOver { epoch: 1, end: RingEnd::Left { rank: 1 } };
    assert_eq!(meeting.end(a), over);
    // One that leaves after the end is not waited for.
    meeting.send(d, Leave {});
    meeting.send(a, again("a", 1));
    let e = meeting.join(join("e"));
    assert_eq!(meeting.end(c), over);
    meeting.send(c, again("c", 1));
    assert_eq!(meeting.formed(e), Formed { epoch: 2, rank: 1, indices: vec![0, 1, 2] });
    // One that waits leaves too, and so does one that has not asked.
    let f = meeting.join(join("f"));
    meeting.send(f, Leave {});
    assert_eq!(meeting.take(f).last(), Some(&Message::from(Left {})));
    let stranger = meeting.arrive(hello(5));
    meeting.send(stranger, Leave {});
    assert_eq!(meeting.take(stranger), [Message::from(Left {})]);
}

//
#[test]
fn a_process_that_starts_again_fences_the_one_before() {
    let mut meeting = Meeting::new(1);
    let [a, _, c, d] = meeting.four();
    let older = meeting.arrive(hello(50));
    meeting.send(older, join("e"));
    let newer = meeting.arrive(hello(51));
    meeting.send(newer, join("e"));
    assert_eq!(meeting.refusal(older).to_string(), "client epoch 50 is fenced by epoch 51");
    // The member of a running ring hears that it is the one that was lost.
    meeting.take(a);
    let b = meeting.arrive(hello(60));
    meeting.send(b, join("b"));
    let over = RingOver {
        epoch: 1,
        end: lost(1, "b", Duration::ZERO, "another process has taken its id"),
    };
    assert_eq!(meeting.end(a), over);
    assert_eq!(meeting.end(2), over);
    assert!(!meeting.open.contains(&2));
    for member in [(a, "a"), (c, "c"), (d, "d")] {
        meeting.send(member.0, again(member.1, 1));
    }
    assert_eq!(meeting.formed(b), Formed { epoch: 2, rank: 1, indices: vec![0, 1, 2, 3, 4] });
    // The processes before do not come back.
    for (incarnation, id) in [(50, "e"), (1_001, "b")] {
        let zombie = meeting.arrive(hello(incarnation));
        meeting.send(zombie, join(id));
        let refusal = meeting.refusal(zombie).to_string();
        assert!(refusal.starts_with(&format!("client epoch {incarnation} is fenced")), "{refusal}");
    }
    meeting.take(a);
    assert!(meeting.open.contains(&a));
    // A process whose connection broke does.
    meeting.close(b);
    let back = meeting.arrive(hello(60));
    meeting.send(back, again("b", 2));
    for member in [(a, "a"), (c, "c"), (d, "d"), (newer, "e")] {
        meeting.send(member.0, again(member.1, 2));
    }
    assert_eq!(meeting.formed(back).rank, 1);
}

//
#[test]
fn a_lost_process_is_fenced_once_another_has_its_id() {
    let mut meeting = Meeting::new(1);
    let [a, ..] = meeting.four();
    meeting.close(a);
    let newer = meeting.join(join("a"));
    let zombie = meeting.arrive(hello(1_000));
    meeting.send(zombie, again("a", 1));
    assert!(meeting.refusal(zombie).to_string().starts_with("client epoch 1000 is fenced"));
    assert!(meeting.open.contains(&newer));
}

//
#[test]
fn a_minority_does_not_go_on_while_the_majority_may_have_a_successor() {
    let serving = Some(Incarnation(999));
    for (serving, silent, forms) in [(serving, 3, false), (serving, 2, true), (None, 3, true)] {
        let mut meeting = Meeting::with(RendezvousConfig { serving, ..config(1) });
        let all = meeting.four();
        let (quiet, heard) = all.split_at(silent);
        meeting.mute.extend(quiet);
        meeting.pass(2 * LEASE);
        for (&connection, id) in heard.iter().zip(&["a", "b", "c", "d"][silent..]) {
            assert_eq!(meeting.end(connection).epoch, 1);
            meeting.send(connection, again(id, 1));
        }
        let last = heard[heard.len() - 1];
        match forms {
            true => assert_eq!(meeting.formed(last).indices.len(), heard.len()),
            false => {
                assert_eq!(meeting.waits(last), (1, 2, vec![0, 1, 2]));
                meeting.pass(2 * WINDOW);
                assert!(matches!(meeting.refusal(last), Refusal::Deadline { .. }));
            }
        }
    }
}

/// A rendezvous in a member, with the ring of a, b, c and d.
fn serving() -> (Meeting, [u64; 4]) {
    let serving = Some(Incarnation(999));
    let mut meeting = Meeting::with(RendezvousConfig { serving, ..config(1) });
    let all = meeting.four();
    for member in all {
        meeting.send(member, RingEntered { epoch: 1 });
    }
    (meeting, all)
}

// a silent member that comes back is with this part.
#[test]
fn a_minority_goes_on_once_silent_members_are_back() {
    let (mut meeting, [a, b, c, d]) = serving();
    meeting.mute.extend([a, b, c]);
    meeting.pass(2 * LEASE);
    meeting.send(d, again("d", 1));
    // Another process with the id of a member does not tell where that went on.
    let c = meeting.join(again("c", 1));
    assert_eq!(meeting.waits(c).0, 2);
    let process = meeting.processes[&b];
    let b = meeting.arrive(hello(process.0));
    meeting.send(b, again("b", 1));
    assert_eq!(meeting.formed(d).indices, [1, 2, 3]);
    assert_eq!(meeting.formed(b).indices, [1, 2, 3]);
}

// a closed connection does not prove the end of a process, even right after its last message.
// A port that refuses does, but only before the process may have been at a successor.
#[test]
fn a_rendezvous_goes_on_alone_if_others_have_ended_in_time() {
    for (after, forms) in [(LEASE / 2, true), (LEASE + LEASE / 16, false)] {
        let (mut meeting, [a, b, c, d]) = serving();
        for connection in [a, b, c] {
            meeting.send(connection, Heartbeat {});
            meeting.cut(connection);
        }
        meeting.send(d, again("d", 1));
        meeting.pass(after);
        meeting.dead.insert(meeting.processes[&b]);
        meeting.pass(LEASE / 16);
        match forms {
            true => assert_eq!(meeting.formed(d).indices, [3]),
            false => {
                meeting.pass(WINDOW);
                let refusal = meeting.refusal(d).to_string();
                let expected = "for half of the 4 members of ring 1: 1 have come";
                assert!(refusal.ends_with(expected), "{refusal}");
            }
        }
    }
}

// a heartbeat confirms that the answer to the one before was read.
#[test]
fn a_heartbeat_binds_a_member_until_a_lease_after_the_answer_before() {
    let late = LEASE / 2 + LEASE / 16;
    for (answers_read, after, forms) in [(0, late, false), (1, late - LEASE / 8, true)] {
        let (mut meeting, [a, b, c, d]) = serving();
        meeting.mute.extend([a, b, c]);
        for _ in 0..=answers_read {
            meeting.pass(LEASE / 2);
            for connection in [a, b, c] {
                meeting.send(connection, Heartbeat {});
            }
        }
        meeting.pass(after);
        for connection in [a, b, c] {
            meeting.close(connection);
        }
        meeting.send(d, again("d", 1));
        match forms {
            true => assert_eq!(meeting.formed(d).indices, [3]),
            false => assert_eq!(meeting.waits(d), (1, 2, vec![0, 1, 2])),
        }
    }
}

// half of a ring of which a member has not heard is no quorum of the ring before.
#[test]
fn a_ring_that_not_all_have_entered_replaces_none() {
    for has_entered in [false, true] {
        let (mut meeting, [a, b, c, d]) = serving();
        meeting.cut(a);
        meeting.cut(b);
        meeting.send(c, again("c", 1));
        meeting.send(d, again("d", 1));
        assert_eq!(meeting.formed(d).indices, [2, 3]);
        meeting.send(d, RingEntered { epoch: 2 });
        if has_entered {
            meeting.send(c, RingEntered { epoch: 2 });
        }
        meeting.cut(c);
        meeting.send(d, again("d", 2));
        match has_entered {
            true => assert_eq!(meeting.formed(d).indices, [3]),
            false => {
                meeting.pass(2 * WINDOW);
                let refusal = meeting.refusal(d).to_string();
                let expected = "for half of the 4 members of ring 1: 1 have come";
                assert!(refusal.ends_with(expected), "{refusal}");
            }
        }
    }
}

//
#[test]
fn a_rendezvous_that_has_lost_its_own_member_sends_the_others_on() {
    let mut meeting =
        Meeting::with(RendezvousConfig { serving: Some(Incarnation(1)), ..config(1) });
    let own = meeting.arrive(hello(1));
    meeting.send(own, RingJoin { size: 2, ..join("own") });
    let other = meeting.join(RingJoin { size: 2, ..join("other") });
    let late = meeting.join(RingJoin { size: 2, ..join("late") });
    meeting.cut(own);
    assert_eq!(meeting.refusal(late), Refusal::Stopping {});
    meeting.send(other, again("other", 1));
    assert_eq!(meeting.refusal(other), Refusal::Stopping {});
}

#[test]
fn a_rendezvous_whose_own_member_has_left_forms_no_ring() {
    let mut meeting =
        Meeting::with(RendezvousConfig { serving: Some(Incarnation(1)), ..config(1) });
    let mut greeting = hello(1);
    greeting.incarnation = Incarnation(1);
    let own = meeting.arrive(greeting);
    meeting.send(own, again("own", 0));
    meeting.send(own, Leave {});
    let other = meeting.arrive(hello(2));
    meeting.send(other, join("other"));
    assert_eq!(meeting.refusal(other), Refusal::Stopping {});
}

#[test]
fn members_that_wait_when_the_own_member_leaves_meet_elsewhere() {
    let serving = Some(Incarnation(1_000));
    let mut meeting = Meeting::with(RendezvousConfig { serving, ..config(1) });
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|id| meeting.join(join(id)));
    meeting.send(a, RingOver { epoch: 1, end: given_up(0) });
    meeting.send(b, again("b", 1));
    meeting.send(a, Leave {});
    for (other, id) in [(b, "b"), (c, "c"), (d, "d")] {
        if other != b {
            meeting.send(other, again(id, 1));
        }
        assert_eq!(meeting.refusal(other), Refusal::Stopping {}, "{id}");
    }
}
