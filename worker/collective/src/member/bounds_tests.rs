//! What a member does once it has ended, and with a rendezvous that names members without end.

use pushpull_common::protocol::message::{Refused, RingFormed, RingMember};

use super::*;

fn connected(now: Instant) -> Member {
    let mut member = Member::new(
        now,
        MemberFacts {
            job: "ring".to_owned(),
            id: "m".to_owned(),
            index: None,
            size: 3,
            host: "host".to_owned(),
            addresses: Vec::new(),
            incarnation: Incarnation(5),
            identity: Identity::new(),
            lease: Duration::from_secs(4),
        },
    );
    member.handle(now, MemberInput::Join);
    member.handle(now, MemberInput::Connected);
    member
}

fn outputs(member: &mut Member) -> Vec<MemberOutput> {
    std::iter::from_fn(|| member.poll_output()).collect()
}

/// A timer that is due and changes nothing would keep a thread busy.
#[test]
fn a_member_that_has_ended_asks_for_no_tick() {
    let now = Instant::now();
    let mut refused = connected(now);
    let refusal = Refusal::Role { role: 1, kind: 2 };
    refused.handle(now, MemberInput::Message(Refused { refusal }.into()));
    let mut left = connected(now);
    left.handle(now, MemberInput::Leave);
    left.handle(now, MemberInput::Closed { cause: String::new() });
    for mut member in [refused, left] {
        assert_eq!(outputs(&mut member).pop(), Some(MemberOutput::Disconnect));
        assert_eq!(member.wake_at(), None);
    }
}

#[test]
fn a_rendezvous_that_names_members_without_end_fills_no_memory() {
    let now = Instant::now();
    let mut member = connected(now);
    let size = RING_SIZE_MAX as u32 + 1;
    for rank in 0..size {
        let named = RingMember {
            rank,
            index: rank,
            process: Incarnation(rank.into()),
            host: Text::clipped("host"),
            addresses: RankAddresses::default(),
        };
        member.handle(now, MemberInput::Message(named.into()));
    }
    member.check_memory();
    let formed =
        RingFormed { rendezvous: 7, epoch: 1, rank: 0, size, lease_ms: 4000, serving: None };
    member.handle(now, MemberInput::Message(formed.into()));
    let lost = "the ring of epoch 1 is incomplete".to_owned();
    let outputs = outputs(&mut member);
    assert!(outputs.contains(&MemberOutput::RendezvousLost { cause: lost }), "{outputs:?}");
}
