//! Tests of a member against a rendezvous that the tests play.

use pushpull_common::protocol::message::{Left, Refused, RingFormed, RingMember, RingMoved};

use super::*;

const LEASE: Duration = Duration::from_millis(1000);

fn member(now: Instant) -> Member {
    Member::new(
        now,
        MemberFacts {
            job: "job".to_owned(),
            id: "second".to_owned(),
            index: Some(1),
            size: 2,
            host: "host".to_owned(),
            addresses: vec!["own".to_owned()],
            incarnation: Incarnation(1),
            identity: Identity::new(),
            lease: LEASE,
        },
    )
}

fn outputs(member: &mut Member) -> Vec<MemberOutput> {
    std::iter::from_fn(|| member.poll_output()).collect()
}

/// A member that is rank 1 of 2. Rank 0 serves.
fn in_ring(now: Instant) -> Member {
    let mut member = member(now);
    member.handle(now, MemberInput::Join);
    member.handle(now, MemberInput::Connected);
    for rank in 0..2_u32 {
        let addresses = [Text::clipped("of another")].into_iter();
        member.handle(
            now,
            MemberInput::Message(
                RingMember {
                    rank,
                    index: rank,
                    process: Incarnation(u64::from(rank)),
                    host: Text::clipped("host"),
                    addresses: RankAddresses::of(addresses).unwrap_or_default(),
                }
                .into(),
            ),
        );
    }
    let lease_ms = LEASE.as_millis() as u32;
    let formed =
        RingFormed { rendezvous: 1, epoch: 1, rank: 1, size: 2, lease_ms, serving: Some(0) };
    member.handle(now, MemberInput::Message(formed.into()));
    let formed = outputs(&mut member);
    assert!(matches!(formed.last(), Some(MemberOutput::Formed(_))), "{formed:?}");
    member
}

/// Returns the members that the member does without, as its last request names them.
fn gone(outputs: &[MemberOutput]) -> Vec<u32> {
    let mut joins = outputs.iter().filter_map(|output| match output {
        MemberOutput::Send(Message::RingJoin(join)) => Some(join.gone.items().to_vec()),
        _ => None,
    });
    joins.next_back().unwrap_or_default()
}

#[test]
fn a_broken_connection_does_not_prove_that_the_serving_member_is_gone() {
    let now = Instant::now();
    let mut member = in_ring(now);
    member.handle(now, MemberInput::Closed { cause: "reset".to_owned() });
    member.handle(now, MemberInput::Join);
    let place = Place::Member { addresses: vec!["of another".to_owned()] };
    let asked = outputs(&mut member);
    assert_eq!(asked.last(), Some(&MemberOutput::Connect(place)), "{asked:?}");
    assert!(!asked.contains(&MemberOutput::Serve), "{asked:?}");
    // It lives: it serves on.
    member.handle(now, MemberInput::Connected);
    assert_eq!(gone(&outputs(&mut member)), Vec::<u32>::new());
}

#[test]
fn a_port_that_refuses_proves_that_the_serving_member_is_gone() {
    let now = Instant::now();
    let mut member = in_ring(now);
    member.handle(now, MemberInput::Closed { cause: "reset".to_owned() });
    member.handle(now, MemberInput::Join);
    member.handle(now, MemberInput::NotConnected { cause: "refused".to_owned(), gone: true });
    assert!(outputs(&mut member).contains(&MemberOutput::Serve));
    let now = member.wake_at().expect("it tries again");
    member.handle(now, MemberInput::Tick);
    assert_eq!(outputs(&mut member), [MemberOutput::Connect(Place::Own)]);
    member.handle(now, MemberInput::Connected);
    assert_eq!(gone(&outputs(&mut member)), [0]);
}

#[test]
fn a_serving_member_that_cannot_be_reached_is_passed_over_after_a_lease() {
    let mut now = Instant::now();
    let mut member = in_ring(now);
    member.handle(now, MemberInput::Closed { cause: "reset".to_owned() });
    member.handle(now, MemberInput::Join);
    let begin = now;
    let serves = |member: &mut Member| outputs(member).contains(&MemberOutput::Serve);
    while !serves(&mut member) {
        assert!(now <= begin + 2 * LEASE, "it tries for ever");
        let cause = "no route".to_owned();
        member.handle(now, MemberInput::NotConnected { cause, gone: false });
        now = member.wake_at().unwrap_or(now);
        member.handle(now, MemberInput::Tick);
    }
    assert!(now >= begin + LEASE);
    now = member.wake_at().unwrap_or(now);
    member.handle(now, MemberInput::Tick);
    member.handle(now, MemberInput::Connected);
    assert_eq!(gone(&outputs(&mut member)), Vec::<u32>::new());
}

#[test]
fn a_member_that_has_ended_needs_no_ticks() {
    let now = Instant::now();
    let mut left = in_ring(now);
    left.handle(now, MemberInput::Leave);
    left.handle(now, MemberInput::Message(Left {}.into()));
    assert_eq!(left.wake_at(), None);
    let mut refused = in_ring(now);
    let refusal = Refusal::Busy { what: Detail::clipped("members"), limit: 1 };
    refused.handle(now, MemberInput::Message(Refused { refusal }.into()));
    assert_eq!(refused.wake_at(), None);
}

/// Ticks a member whenever it asks for it, until it disconnects. Returns that time.
fn until_lost(member: &mut Member, limit: Instant) -> Instant {
    loop {
        let now = member.wake_at().expect("its lease runs");
        assert!(now <= limit, "it waits for ever");
        member.handle(now, MemberInput::Tick);
        if outputs(member).contains(&MemberOutput::Disconnect) {
            return now;
        }
    }
}

#[test]
fn a_member_that_was_stopped_reads_before_it_takes_the_rendezvous_for_lost() {
    // However long it was stopped, the rendezvous has half a lease.
    for stopped in [LEASE, LEASE + LEASE / 10, 3 * LEASE] {
        let now = Instant::now();
        let mut member = in_ring(now);
        member.handle(now + LEASE / 4, MemberInput::Tick);
        let now = now + stopped;
        member.handle(now, MemberInput::Tick);
        assert!(!outputs(&mut member).contains(&MemberOutput::Disconnect), "{stopped:?}");
        assert_eq!(until_lost(&mut member, now + LEASE), now + LEASE / 2, "{stopped:?}");
    }
}

#[test]
fn members_meet_at_a_successor_once_the_serving_member_has_left() {
    let now = Instant::now();
    let mut member = in_ring(now);
    let over = RingOver { epoch: 1, end: RingEnd::Left { rank: 0 } };
    member.handle(now, MemberInput::Message(over.into()));
    member.handle(now, MemberInput::Join);
    let refused = Refused { refusal: Refusal::Stopping {} };
    member.handle(now, MemberInput::Message(refused.into()));
    assert!(outputs(&mut member).contains(&MemberOutput::Serve));
    let now = member.wake_at().expect("it tries again");
    member.handle(now, MemberInput::Tick);
    assert_eq!(outputs(&mut member), [MemberOutput::Connect(Place::Own)]);
    member.handle(now, MemberInput::Connected);
    assert_eq!(gone(&outputs(&mut member)), [0]);
}

#[test]
fn a_new_member_follows_a_rendezvous_that_has_moved() {
    let mut now = Instant::now();
    let mut member = member(now);
    member.handle(now, MemberInput::Join);
    member.handle(now, MemberInput::Connected);
    let addresses = RankAddresses::of([Text::clipped("there")]).unwrap_or_default();
    member.handle(now, MemberInput::Message(RingMoved { addresses }.into()));
    let asked = outputs(&mut member);
    assert_eq!(asked.last(), Some(&MemberOutput::Disconnect), "{asked:?}");
    now = member.wake_at().expect("it goes there");
    member.handle(now, MemberInput::Tick);
    let place = Place::Member { addresses: vec!["there".to_owned()] };
    assert_eq!(outputs(&mut member), [MemberOutput::Connect(place)]);
    // It may have moved again: the way leads over the meeting.
    member.handle(now, MemberInput::NotConnected { cause: "refused".to_owned(), gone: true });
    now = member.wake_at().expect("it tries again");
    outputs(&mut member);
    member.handle(now, MemberInput::Tick);
    assert_eq!(outputs(&mut member), [MemberOutput::Connect(Place::Meeting)]);
}

#[test]
fn an_end_that_arrives_late_does_not_end_the_next_ring() {
    let now = Instant::now();
    let mut member = in_ring(now);
    let end = RingEnd::GivenUp { rank: 1, detail: Detail::clipped("dropped") };
    let over = RingOver { epoch: 1, end: end.clone() };
    member.handle(now, MemberInput::Report { epoch: 1, end: end.clone() });
    assert_eq!(outputs(&mut member), [MemberOutput::Send(over.clone().into())]);
    // The program shrinks before it has heard of the end.
    member.handle(now, MemberInput::Join);
    assert_eq!(outputs(&mut member), []);
    member.handle(now, MemberInput::Message(over.into()));
    let asked = outputs(&mut member);
    assert_eq!(asked[0], MemberOutput::Over { epoch: 1, end: end.clone() });
    assert!(matches!(&asked[1], MemberOutput::Send(Message::RingJoin(join)) if join.epoch == 1));
    // A reason that the program has found in that ring is none of the next.
    member.handle(now, MemberInput::Report { epoch: 1, end });
    assert_eq!(outputs(&mut member), []);
}

#[test]
fn a_member_that_computes_tells_the_successor_that_it_lives() {
    let now = Instant::now();
    let mut member = in_ring(now);
    member.handle(now, MemberInput::Closed { cause: "reset".to_owned() });
    let place = Place::Member { addresses: vec!["of another".to_owned()] };
    assert_eq!(outputs(&mut member).last(), Some(&MemberOutput::Connect(place)));
    member.handle(now, MemberInput::Connected);
    let present = MemberOutput::Send(RingEntered { epoch: 1 }.into());
    assert_eq!(outputs(&mut member).last(), Some(&present));
    // The program asks after its step, on the same connection.
    member.handle(now, MemberInput::Join);
    let asked = outputs(&mut member);
    assert!(matches!(&asked[..], [MemberOutput::Send(Message::RingJoin(_))]), "{asked:?}");
}

#[test]
fn a_new_member_tries_again_where_nobody_serves_yet() {
    let mut now = Instant::now();
    let mut member = member(now);
    member.handle(now, MemberInput::Join);
    for _ in 0..3 {
        member.handle(now, MemberInput::Connected);
        outputs(&mut member);
        let refused = Refused { refusal: Refusal::Stopping {} };
        member.handle(now, MemberInput::Message(refused.into()));
        assert_eq!(outputs(&mut member), [MemberOutput::Disconnect]);
        now = member.wake_at().expect("it tries again");
        member.handle(now, MemberInput::Tick);
        assert_eq!(outputs(&mut member), [MemberOutput::Connect(Place::Meeting)]);
    }
}
