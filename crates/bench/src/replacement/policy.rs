//! What a policy is, the names of the policies, and counting what they miss.

use std::fmt;
use std::str::FromStr;

use super::arc::Arc;
use super::clock::Clock;
use super::lirs::Lirs;
use super::lru::Lru;
use super::opt::Opt;
use super::s3_fifo::S3Fifo;
use super::trace::Trace;
use super::zfolio::{Rule, Zfolio};

/// What an access found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// The page was resident.
    Hit,
    /// The page was in the staging area: a fault that moves pages, and decompresses nothing.
    Rescue,
    /// The page was out, or never accessed before.
    Miss,
}

/// A policy with a fixed capacity.
pub(crate) trait Policy {
    /// Brings `page` in if it is not resident, after making room for it.
    fn access(&mut self, page: u32) -> Access;

    /// The access that was told last has written to its page.
    fn wrote(&mut self, _page: u32) {}

    /// Writes that would have been a fault of their own: the page was held, and protected to learn of its use.
    fn write_faults(&self) -> u64 {
        0
    }

    /// Pages held, staged ones included.
    fn held(&self) -> usize;
}

/// Which policy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Name {
    Opt,
    Lru,
    Clock,
    S3Fifo,
    Arc,
    Lirs,
    Zfolio(Rule),
}

impl Name {
    /// The policies without parameters.
    const PLAIN: [(&'static str, Name); 6] = [
        ("opt", Name::Opt),
        ("lru", Name::Lru),
        ("clock", Name::Clock),
        ("s3-fifo", Name::S3Fifo),
        ("arc", Name::Arc),
        ("lirs", Name::Lirs),
    ];

    /// The policy with room for `capacity` pages, with nothing held yet.
    pub(crate) fn start(&self, trace: &Trace, capacity: usize) -> Box<dyn Policy> {
        let pages = trace.pages.len();
        match self {
            Name::Opt => Box::new(Opt::new(trace, capacity)),
            Name::Lru => Box::new(Lru::new(pages, capacity)),
            Name::Clock => Box::new(Clock::new(pages, capacity)),
            Name::S3Fifo => Box::new(S3Fifo::new(pages, capacity)),
            Name::Arc => Box::new(Arc::new(pages, capacity)),
            Name::Lirs => Box::new(Lirs::new(pages, capacity)),
            Name::Zfolio(rule) => Box::new(Zfolio::new(*rule, trace, capacity)),
        }
    }
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Name, String> {
        if let Some((_, name)) = Name::PLAIN.iter().find(|(name, _)| *name == text) {
            return Ok(name.clone());
        }
        match text.split_once(',') {
            None if text == "zfolio" => Ok(Name::Zfolio(Rule::PRODUCT)),
            Some(("zfolio", parameters)) => Ok(Name::Zfolio(parameters.parse()?)),
            _ => {
                let names = Name::PLAIN.map(|(name, _)| name).join(", ");
                Err(format!(
                    "'{text}' is not a policy; accepted: {names}, zfolio[,PARAMETER=VALUE]..."
                ))
            }
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Name::PLAIN.iter().find(|(_, name)| name == self) {
            Some((name, _)) => f.write_str(name),
            None => match self {
                Name::Zfolio(rule) => write!(f, "zfolio{rule}"),
                other => unreachable!("{other:?} is a plain one"),
            },
        }
    }
}

/// What the accesses of a trace found.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Counts {
    pub(crate) hits: u64,
    pub(crate) rescues: u64,
    pub(crate) misses: u64,
    pub(crate) write_faults: u64,
}

/// Runs a policy on a trace.
pub(crate) fn count(name: &Name, trace: &Trace, capacity: usize) -> Counts {
    let mut policy = name.start(trace, capacity);
    let mut counts = Counts::default();
    for visit in &trace.accesses {
        match policy.access(visit.page()) {
            Access::Hit => counts.hits += 1,
            Access::Rescue => counts.rescues += 1,
            Access::Miss => counts.misses += 1,
        }
        if visit.is_write() {
            policy.wrote(visit.page());
        }
        debug_assert!(policy.held() <= capacity, "{name} holds {} pages", policy.held());
    }
    counts.write_faults = policy.write_faults();
    counts
}

/// Which accesses of a string were hits, for tests.
#[cfg(test)]
pub(crate) fn hits_of(name: &str, string: &[u32], capacity: usize) -> Vec<usize> {
    let trace = Trace::of("string", string.iter().map(|page| u64::from(*page)));
    let name: Name = name.parse().unwrap();
    let mut policy = name.start(&trace, capacity);
    let hit = |at: &usize| policy.access(trace.accesses[*at].page()) == Access::Hit;
    (0..string.len()).filter(hit).collect()
}

/// How many accesses of a string were misses, for tests.
#[cfg(test)]
pub(crate) fn misses_of(name: &str, string: &[u32], capacity: usize) -> u64 {
    let trace = Trace::of("string", string.iter().map(|page| u64::from(*page)));
    count(&name.parse().unwrap(), &trace, capacity).misses
}

#[cfg(test)]
mod tests {
    use super::{Access, Name, count};
    use crate::replacement::trace::Trace;
    use zfolio_core::testing::recording::Touch;
    use zfolio_core::testing::{Random, seed};

    const NAMES: [&str; 13] = [
        "opt",
        "lru",
        "clock",
        "s3-fifo",
        "arc",
        "lirs",
        "zfolio",
        "zfolio,enter=main",
        "zfolio,ghosts=probation,staging=8,rescue=page,folio=4",
        "zfolio,ghosts=all,probation=8,folio=16",
        "zfolio,enter=main,staging=16,folio=4",
        "zfolio,watch=2",
        "zfolio,enter=main,folio=4,watch=3",
    ];

    fn names() -> impl Iterator<Item = Name> {
        NAMES.iter().map(|name| name.parse().unwrap())
    }

    /// Accesses with some locality: jumps, short runs, and returns to a few pages.
    fn random_trace(random: &mut Random) -> Trace {
        let pages = 1 + random.below_u64(80);
        let mut page = 0;
        let accesses = (0..1_500).map(|_| {
            page = match random.below(4) {
                0 => random.below_u64(pages),
                1 => random.below_u64(pages.div_ceil(8)),
                _ => (page + 1) % pages,
            };
            Touch { page, write: random.below(3) == 0 }
        });
        Trace::of_touches("random", &accesses.collect::<Vec<_>>())
    }

    /// Goal: no policy misses less often than the optimum; hits, rescues and misses add up; no
    /// policy holds more pages than its capacity, or misses a page that it just brought in. Method:
    /// all policies on seeded random traces.
    #[test]
    fn no_policy_beats_the_optimum_or_its_capacity() {
        let seed = seed();
        let mut random = Random::new(seed);
        for round in 0..60 {
            let trace = random_trace(&mut random);
            let capacity = 2 + random.below(60);
            let best = count(&Name::Opt, &trace, capacity).misses;
            for name in names() {
                let context = format!("{name}, capacity {capacity}, seed {seed}, round {round}");
                let mut policy = name.start(&trace, capacity);
                let (mut misses, mut last) = (0, None);
                for visit in &trace.accesses {
                    let page = visit.page();
                    let access = policy.access(page);
                    if visit.is_write() {
                        policy.wrote(page);
                    }
                    misses += u64::from(access == Access::Miss);
                    assert!(policy.held() <= capacity, "{} held: {context}", policy.held());
                    assert!(last != Some(page) || access == Access::Hit, "{context}");
                    last = Some(page);
                }
                assert!(misses >= best, "{misses} misses, the optimum has {best}: {context}");
                let counts = count(&name, &trace, capacity);
                assert_eq!(counts.misses, misses, "{context}");
                let all = counts.hits + counts.rescues + counts.misses;
                assert_eq!(all, trace.accesses.len() as u64, "{context}");
                if capacity >= trace.pages.len() {
                    assert_eq!(counts.misses, trace.pages.len() as u64, "{context}");
                }
            }
        }
    }

    #[test]
    fn names_are_read_and_written() {
        for (name, text) in names().zip(NAMES) {
            assert_eq!(name.to_string().parse::<Name>(), Ok(name), "{text}");
        }
        for text in ["", "mru", "lru,x=1", "zfolio,", "zfolio,staging=0", "zfolio,staging=x"] {
            assert!(text.parse::<Name>().is_err(), "{text}");
        }
        for text in [
            "zfolio,enter=top",
            "zfolio,folio=0",
            "zfolio,folio=17",
            "zfolio,watch=0",
            "zfolio,a=b",
        ] {
            assert!(text.parse::<Name>().is_err(), "{text}");
        }
    }
}
